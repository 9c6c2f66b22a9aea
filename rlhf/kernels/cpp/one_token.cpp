// One new token a row: torch.ops.rlhf.products and .attend; kernels.py says what they compute.
//
// Both take what is large, weights or keys, as the left operand, which is read as it lies, and the few new tokens as
// the right one.

namespace {

constexpr int64_t WIDTH = Floats::size();
constexpr int64_t ROWS = 32;  // of a weight, multiplied at once
constexpr int64_t AHEAD = 8;  // tokens whose values are asked for before they are needed
constexpr int PARTS = 4;      // vectors of a value, added up at once

// left [rows, inner] times what `turn` made of [columns, inner] -> [rows, columns]
template <typename T>
void multiply(const T* left, const T* right, int64_t rows, int64_t columns, int64_t inner, float* to) {
  at::native::cpublas::brgemm(
      rows, columns, inner, inner, columns, columns, false, left, right, to, sizeof(T) == sizeof(BFloat16));
}

struct Part {  // up to ROWS rows of a weight
  const char* weight;
  const char* bias;
  int64_t rows;
  int64_t place;  // of its first row among all outputs
};

std::vector<Part> parts_of(at::TensorList weights, at::TensorList biases) {
  std::vector<Part> parts;
  int64_t before = 0;
  for (size_t i = 0; i < weights.size(); i++) {
    TORCH_CHECK(weights[i].is_contiguous(), "rlhf::products: a weight is not contiguous");
    int64_t rows = weights[i].size(0), size = weights[i].element_size(), width = weights[i].size(1);
    auto* weight = static_cast<const char*>(weights[i].const_data_ptr());
    auto* bias = biases.empty() ? nullptr : static_cast<const char*>(biases[i].const_data_ptr());
    for (int64_t row = 0; row < rows; row += ROWS)
      parts.push_back({weight + row * width * size, bias ? bias + row * size : nullptr, std::min(ROWS, rows - row),
                       before + row});
    before += rows;
  }
  return parts;
}

template <typename T>
void products_of(const Tensor& x, const std::vector<Part>& parts, const Tensor& out) {
  int64_t width = x.size(-1), tokens = x.numel() / width, outputs = out.size(-1);
  at::parallel_for(0, parts.size(), 1, [&](int64_t begin, int64_t end) {
    std::unique_ptr<T[]> turned(new T[width * tokens]);  // each core its own: what another one wrote comes slowly
    turn(x.const_data_ptr<T>(), tokens, width, width, turned.get(), tokens);
    std::vector<float> sums(ROWS * tokens);
    std::vector<T> rounded(ROWS * tokens);
    for (int64_t i = begin; i < end; i++) {
      auto& part = parts[i];
      auto* weight = reinterpret_cast<const T*>(part.weight);
      multiply(weight, turned.get(), part.rows, tokens, width, sums.data());
      if (part.bias)
        for (int64_t row = 0; row < part.rows; row++) {
          Floats bias(static_cast<float>(reinterpret_cast<const T*>(part.bias)[row]));
          auto* sum = &sums[row * tokens];
          at::vec::map<float>([&](Floats x) { return x + bias; }, sum, sum, tokens);
        }
      at::vec::convert<float, T>(sums.data(), rounded.data(), part.rows * tokens);
      transpose(rounded.data(), part.rows, tokens, tokens, out.data_ptr<T>() + part.place, outputs);
    }
    at::native::cpublas::brgemm_release(sizeof(T) == sizeof(BFloat16));
  });
}

Tensor products(const Tensor& states, at::TensorList weights, at::TensorList biases) {
  auto x = states.contiguous();
  auto parts = parts_of(weights, biases);
  auto sizes = x.sizes().vec();
  sizes.back() = parts.back().place + parts.back().rows;
  auto out = at::empty(sizes, x.options());
  if (x.scalar_type() == at::kBFloat16)
    products_of<BFloat16>(x, parts, out);
  else
    products_of<float>(x, parts, out);
  return out;
}

template <typename T>
inline void load(const T* from, Floats* to) {
  for (int part = 0; part < PARTS; part += 2)
    if constexpr (sizeof(T) == sizeof(BFloat16)) {
      std::tie(to[part], to[part + 1]) = at::vec::convert_to_float<T>(Vectorized<T>::loadu(from + part * WIDTH));
    } else {
      to[part] = Floats::loadu(from + part * WIDTH);
      to[part + 1] = Floats::loadu(from + (part + 1) * WIDTH);
    }
}

// For each of HEADS heads the sum over tokens of its weight times the token's value. weights [HEADS, room of tokens],
// values [tokens, size] -> [HEADS, size]
template <typename T, int HEADS>
void mix(const float* weights, int64_t room, const T* values, int64_t tokens, int64_t size, T* to) {
  T padded[PARTS * WIDTH] = {};
  for (int64_t start = 0; start < size; start += PARTS * WIDTH) {
    int64_t count = std::min(PARTS * WIDTH, size - start);
    Floats sums[HEADS][PARTS];
    for (auto& of_head : sums)
      for (auto& sum : of_head) sum = Floats(0.0f);
    for (int64_t token = 0; token < tokens; token++) {
      const T* from = values + token * size + start;
      __builtin_prefetch(from + AHEAD * size);
      __builtin_prefetch(reinterpret_cast<const char*>(from + AHEAD * size) + 64);
      if (count < PARTS * WIDTH) from = std::copy_n(from, count, padded) - count;
      Floats value[PARTS];
      load(from, value);
      for (int head = 0; head < HEADS; head++) {
        Floats weight(weights[head * room + token]);
        for (int part = 0; part < PARTS; part++)
          sums[head][part] = at::vec::fmadd(weight, value[part], sums[head][part]);
      }
    }
    for (int head = 0; head < HEADS; head++) {
      float all[PARTS * WIDTH];
      for (int part = 0; part < PARTS; part++) sums[head][part].store(all + part * WIDTH);
      at::vec::convert<float, T>(all, to + head * size + start, count);
    }
  }
}

void softmax(float* scores, const float* hidden, int64_t tokens, float scale) {
  using namespace at::vec;
  map2<float>([&](Floats x, Floats y) { return fmadd(x, Floats(scale), y); }, scores, scores, hidden, tokens);
  Floats most(reduce_all<float>([](Floats& x, Floats& y) { return maximum(x, y); }, scores, tokens));
  map<float>([&](Floats x) { return (x - most).exp(); }, scores, scores, tokens);
  Floats sum(reduce_all<float>([](Floats& x, Floats& y) { return x + y; }, scores, tokens));
  map<float>([&](Floats x) { return x / sum; }, scores, scores, tokens);
}

template <typename T>
void attend_in(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& seen, float scale, const Tensor& out) {
  int64_t groups = k.size(1), room = k.size(2), size = k.size(3), heads = q.size(1) / groups;
  at::parallel_for(0, k.size(0) * groups, 1, [&](int64_t begin, int64_t end) {
    std::vector<T> turned(heads * size);
    std::vector<float> scores(room * heads), weights(heads * room), hidden(room);
    for (int64_t i = begin; i < end; i++) {
      const bool* sees = seen.const_data_ptr<bool>() + i / groups * room;
      int64_t first = std::find(sees, sees + room, true) - sees, last = room;
      while (last > first && !sees[last - 1]) last--;
      int64_t tokens = last - first;
      for (int64_t token = 0; token < tokens; token++)
        hidden[token] = sees[first + token] ? 0.0f : -std::numeric_limits<float>::infinity();
      auto* keys = k.const_data_ptr<T>() + (i * room + first) * size;
      auto* values = v.const_data_ptr<T>() + (i * room + first) * size;
      auto* to = out.data_ptr<T>() + i * heads * size;
      turn(q.const_data_ptr<T>() + i * heads * size, heads, size, size, turned.data(), heads);
      if (tokens > 0) multiply(keys, turned.data(), tokens, heads, size, scores.data());
      transpose(scores.data(), tokens, heads, heads, weights.data(), room);
      for (int64_t head = 0; head < heads; head++) softmax(&weights[head * room], hidden.data(), tokens, scale);
      int64_t head = 0;
      for (; heads - head >= 4; head += 4) mix<T, 4>(&weights[head * room], room, values, tokens, size, to + head * size);
      if (heads - head == 3) mix<T, 3>(&weights[head * room], room, values, tokens, size, to + head * size);
      if (heads - head == 2) mix<T, 2>(&weights[head * room], room, values, tokens, size, to + head * size);
      if (heads - head == 1) mix<T, 1>(&weights[head * room], room, values, tokens, size, to + head * size);
    }
    at::native::cpublas::brgemm_release(sizeof(T) == sizeof(BFloat16));
  });
}

Tensor attend(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& mask, double scale) {
  auto asked = q.contiguous(), k = keys.contiguous(), v = values.contiguous();
  auto seen = mask.expand({k.size(0), 1, 1, k.size(2)}).contiguous();
  auto out = at::empty({q.size(0), 1, q.size(1), q.size(3)}, q.options());
  if (q.scalar_type() == at::kBFloat16)
    attend_in<BFloat16>(asked, k, v, seen, static_cast<float>(scale), out);
  else
    attend_in<float>(asked, k, v, seen, static_cast<float>(scale), out);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rlhf, library) {
  library.def("products(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor");
  library.def("attend(Tensor q, Tensor keys, Tensor values, Tensor seen, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(rlhf, CPU, library) {
  library.impl("products", products);
  library.impl("attend", attend);
}
