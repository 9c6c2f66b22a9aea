// Attention of rows one after the other, BFloat16: torch.ops.rlhf.attend_rows and .attend_rows_backward; kernels.py
// says what they compute.
//
// A row's tokens ask in blocks, one head at a time, and are held against all keys that the block sees, so that their
// softmax is exact. The backward pass computes the weights anew. Buffers have few sizes: oneDNN makes a kernel for each.

namespace {

constexpr int64_t BLOCK = 64;

struct Row {  // its tokens from `second` on do not see those from `common` to there
  int64_t start, common, second, length;
};

struct Stretch {  // of keys, between multiples of BLOCK, and the column where their scores begin
  int64_t begin, end, column;
  int64_t keys() const { return end - begin; }
};

struct Asking {  // up to BLOCK tokens, and what they see in one stretch or two
  int64_t begin, end;
  std::vector<Stretch> seen;
  int64_t columns() const { return seen.back().column + seen.back().keys(); }
};

int64_t down(int64_t x) { return x / BLOCK * BLOCK; }
int64_t up(int64_t x) { return down(x + BLOCK - 1); }

std::vector<Asking> blocks_of(const Row& row) {
  std::vector<Asking> blocks;
  for (int64_t begin = 0, end; begin < row.length; begin = end) {
    end = std::min(begin + BLOCK, begin < row.second ? row.second : row.length);
    if (begin >= row.second && up(row.common) < down(row.second))
      blocks.push_back({begin, end, {{0, up(row.common), 0}, {down(row.second), up(end), up(row.common)}}});
    else
      blocks.push_back({begin, end, {{0, up(end), 0}}});
  }
  return blocks;
}

struct View {  // of one head: [tokens, size], tokens `stride` apart
  const BFloat16* data;
  int64_t stride;
  View from(int64_t token) const { return {data + token * stride, stride}; }
};

View view(const Tensor& x, int64_t head) { return {x.const_data_ptr<BFloat16>() + head * x.stride(1), x.stride(2)}; }

// [1, heads, tokens, size] whose numbers lie in pairs
Tensor readable(const Tensor& x) {
  return x.stride(3) == 1 && x.stride(2) % 2 == 0 && x.stride(1) % 2 == 0 ? x : x.contiguous();
}

// Up to BLOCK rows one after the other, then zeros.
void gather(View from, int64_t rows, int64_t size, BFloat16* to) {
  for (int64_t i = 0; i < rows; i++) std::copy_n(from.data + i * from.stride, size, to + i * size);
  std::fill(to + rows * size, to + BLOCK * size, BFloat16(0.0f));
}

// [rows, size] as a right operand whose inner dimension are the rows: [rows / 2, size, 2]. Up to whole blocks zeros,
// since what was there before need not be finite.
void pair(View from, int64_t rows, int64_t size, BFloat16* to) {
  auto* bits = reinterpret_cast<const uint16_t*>(from.data);
  auto* pairs = reinterpret_cast<uint32_t*>(to);
  for (int64_t i = 0; i < rows; i += 2)
    for (int64_t j = 0; j < size; j++) {
      uint32_t second = i + 1 < rows ? bits[(i + 1) * from.stride + j] : 0;
      pairs[i / 2 * size + j] = bits[i * from.stride + j] | second << 16;
    }
  std::fill(to + (rows + 1) / 2 * 2 * size, to + up(rows) * size, BFloat16(0.0f));
}

// [rows, size] as a right operand whose inner dimension is their size, `stride` wide, with the same zeros.
void turn(View from, int64_t rows, int64_t size, BFloat16* to, int64_t stride) {
  turn(from.data, rows, size, from.stride, to, stride);
  for (int64_t i = 0; i < size / 2; i++)
    std::fill(to + 2 * (i * stride + rows), to + 2 * (i * stride + up(rows)), BFloat16(0.0f));
}

void round_to(const float* from, BFloat16* to, int64_t count) { at::vec::convert<float, BFloat16>(from, to, count); }

// Of the first `seen` of x and those in [from, to) exp(scale x) as a share of the largest; 0 elsewhere. Returns by what
// they are to be multiplied to sum to 1.
float exponentials(float* x, int64_t seen, int64_t from, int64_t to, int64_t columns, float scale) {
  using namespace at::vec;
  auto larger = [](Floats& a, Floats& b) { return maximum(a, b); };
  auto sum = [](Floats& a, Floats& b) { return a + b; };
  Stretch stretches[] = {{0, seen, 0}, {from, to, 0}};
  float most = -std::numeric_limits<float>::infinity(), total = 0.0f;
  for (auto& s : stretches)
    if (s.keys() > 0) most = std::max(most, reduce_all<float>(larger, x + s.begin, s.keys()));
  Floats factor(scale), shift(-scale * most);
  for (auto& s : stretches)
    if (s.keys() > 0) {
      auto* part = x + s.begin;
      map<float>([&](Floats a) { return fmadd(a, factor, shift).exp_u20(); }, part, part, s.keys());
      total += reduce_all<float>(sum, part, s.keys());
    }
  if (to > from) std::fill(x + seen, x + from, 0.0f);
  std::fill(x + std::max(seen, to), x + columns, 0.0f);
  return 1.0f / total;
}

void multiply(float* x, float factor, int64_t count) {
  at::vec::map<float>([&](Floats a) { return a * Floats(factor); }, x, x, count);
}

// What a thread computes in. Of keys and values there are right operands over their numbers (turned) and over tokens
// (paired); of a block scores and the like, [BLOCK, stride].
struct Room {
  int64_t size, stride;
  std::vector<BFloat16> keys_turned, values_turned, keys_paired, values_paired;
  std::vector<BFloat16> asked, told, paired, weights, changes, turned;
  std::vector<float> scores, slopes, sums, dk, dv;
  float shares[BLOCK];  // by what the weights of each token are to be multiplied to sum to 1

  Room(int64_t size, int64_t longest, bool learns) : size(size), stride(BLOCK) {
    while (stride < longest) stride *= 2;
    stride += 32;  // lines a power of two apart would share few places of a cache
    int64_t all = stride * size, block = BLOCK * stride, more = learns;
    keys_turned.resize(all), values_paired.resize(all), keys_paired.resize(more * all);
    values_turned.resize(more * all), dk.resize(more * all), dv.resize(more * all);
    asked.resize(BLOCK * size), told.resize(more * BLOCK * size), paired.resize(more * BLOCK * size);
    sums.resize(BLOCK * size), weights.resize(block), scores.resize(block);
    changes.resize(more * block), turned.resize(more * block), slopes.resize(more * block);
  }

  // left [BLOCK, size] with the keys or values of a block -> [BLOCK, columns]
  void compare(const Asking& block, const std::vector<BFloat16>& left, const std::vector<BFloat16>& right, float* to) {
    for (auto& s : block.seen)
      at::native::cpublas::brgemm(
          BLOCK, s.keys(), size, size, stride, stride, false, left.data(), right.data() + 2 * s.begin, to + s.column);
  }

  // weights [BLOCK, columns] with the keys or values of a block -> sums, [BLOCK, size]
  void mix(const Asking& block, const std::vector<BFloat16>& weights, const std::vector<BFloat16>& right) {
    for (auto& s : block.seen)
      at::native::cpublas::brgemm(
          BLOCK, size, s.keys(), stride, size, size, s.column > 0, weights.data() + s.column,
          right.data() + s.begin * size, sums.data());
  }

  // Adds weights [BLOCK, columns], transposed, times right [BLOCK, size] to the keys or values of a block.
  void add(const Asking& block, const std::vector<BFloat16>& weights, const std::vector<BFloat16>& right, float* to) {
    transpose(weights.data(), BLOCK, block.columns(), stride, turned.data(), BLOCK);
    pair({right.data(), size}, BLOCK, size, paired.data());
    for (auto& s : block.seen)
      at::native::cpublas::brgemm(
          s.keys(), size, BLOCK, BLOCK, size, size, true, turned.data() + s.column * BLOCK, paired.data(),
          to + s.begin * size);
  }

  // scores = exp(scale q k^T), of which the largest is 1, so that rounding them to weights spares what matters most;
  // with `whole` softmax(scale q k^T).
  void weigh(const Row& row, const Asking& block, View q, float scale, bool whole) {
    int64_t columns = block.columns(), shift = block.seen.back().column - block.seen.back().begin;
    gather(q.from(row.start + block.begin), block.end - block.begin, size, asked.data());
    compare(block, asked, keys_turned, scores.data());
    for (int64_t i = 0; i < BLOCK; i++) {
      float* of = scores.data() + i * stride;
      int64_t token = block.begin + i;
      if (token >= block.end)
        std::fill(of, of + columns, 0.0f);
      else if (token < row.second)
        shares[i] = exponentials(of, token + 1, 0, 0, columns, scale);
      else
        shares[i] = exponentials(of, row.common, row.second + shift, token + 1 + shift, columns, scale);
      if (whole && token < block.end) multiply(of, shares[i], columns);
      round_to(of, weights.data() + i * stride, columns);
    }
  }
};

// `task(room, row, group)` for each row and group of heads, by whichever thread is free.
template <typename F>
void each(const Tensor& spans, const Tensor& k, bool learns, const F& task) {
  auto* rows = reinterpret_cast<const Row*>(spans.const_data_ptr<int64_t>());
  int64_t groups = k.size(1), longest = 0;
  for (int64_t i = 0; i < spans.size(0); i++) {
    auto& [start, common, second, length] = rows[i];
    bool possible = 0 <= common && common <= second && second <= length && 0 <= start && start + length <= k.size(2);
    TORCH_CHECK_VALUE(possible, "rlhf::attend_rows: row ", i, " of ", start, ", ", common, ", ", second, ", ", length);
    longest = std::max(longest, length);
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    Room room(k.size(3), longest, learns);
    for (int64_t i; (i = next++) < spans.size(0) * groups;) task(room, rows[i / groups], i % groups);
    at::native::cpublas::brgemm_release();
  });
}

Tensor attend_rows(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& spans, double scale) {
  auto q = readable(q_), k = readable(k_), v = readable(v_);
  int64_t heads = q.size(1), size = q.size(3), shared = heads / k.size(1);
  auto out = at::empty({1, q.size(2), heads, size}, q.options());
  each(spans, k, false, [&](Room& room, const Row& row, int64_t group) {
    turn(view(k, group).from(row.start), row.length, size, room.keys_turned.data(), room.stride);
    pair(view(v, group).from(row.start), row.length, size, room.values_paired.data());
    for (auto& block : blocks_of(row))
      for (int64_t head = group * shared; head < (group + 1) * shared; head++) {
        room.weigh(row, block, view(q, head), static_cast<float>(scale), false);
        room.mix(block, room.weights, room.values_paired);
        auto* to = out.data_ptr<BFloat16>() + ((row.start + block.begin) * heads + head) * size;
        for (int64_t i = 0; i < block.end - block.begin; i++) {
          multiply(&room.sums[i * size], room.shares[i], size);
          round_to(&room.sums[i * size], to + i * heads * size, size);
        }
      }
  });
  return out;
}

// slopes, of the weights, become those of the scores, and `changes`.
void differentiate(Room& room, int64_t columns, float scale) {
  using namespace at::vec;
  for (int64_t i = 0; i < BLOCK; i++) {
    float *weights = &room.scores[i * room.stride], *slopes = &room.slopes[i * room.stride];
    auto product = [](Floats a, Floats b) { return a * b; };
    auto sum = [](Floats a, Floats b) { return a + b; };
    Floats mean(map2_reduce_all<float>(product, sum, weights, slopes, columns)), factor(scale);
    map2<float>([&](Floats a, Floats b) { return a * (b - mean) * factor; }, slopes, weights, slopes, columns);
    round_to(slopes, &room.changes[i * room.stride], columns);
  }
}

std::tuple<Tensor, Tensor, Tensor> attend_rows_backward(
    const Tensor& gradient, const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& spans, double scale) {
  auto q = readable(q_), k = readable(k_), v = readable(v_), told = readable(gradient.transpose(1, 2));
  int64_t tokens = q.size(2), heads = q.size(1), groups = k.size(1), size = q.size(3), shared = heads / groups;
  auto dq = at::empty({1, tokens, heads, size}, q.options());
  auto dk = at::empty({1, tokens, groups, size}, q.options());
  auto dv = at::empty({1, tokens, groups, size}, q.options());
  each(spans, k, true, [&](Room& room, const Row& row, int64_t group) {
    View keys = view(k, group).from(row.start), values = view(v, group).from(row.start);
    turn(keys, row.length, size, room.keys_turned.data(), room.stride);
    turn(values, row.length, size, room.values_turned.data(), room.stride);
    pair(keys, row.length, size, room.keys_paired.data());
    std::fill(room.dk.begin(), room.dk.end(), 0.0f);
    std::fill(room.dv.begin(), room.dv.end(), 0.0f);
    for (auto& block : blocks_of(row))
      for (int64_t head = group * shared; head < (group + 1) * shared; head++) {
        int64_t count = block.end - block.begin;
        room.weigh(row, block, view(q, head), static_cast<float>(scale), true);
        gather(view(told, head).from(row.start + block.begin), count, size, room.told.data());
        room.compare(block, room.told, room.values_turned, room.slopes.data());
        differentiate(room, block.columns(), static_cast<float>(scale));
        room.mix(block, room.changes, room.keys_paired);
        auto* to = dq.data_ptr<BFloat16>() + ((row.start + block.begin) * heads + head) * size;
        for (int64_t i = 0; i < count; i++) round_to(&room.sums[i * size], to + i * heads * size, size);
        room.add(block, room.weights, room.told, room.dv.data());
        room.add(block, room.changes, room.asked, room.dk.data());
      }
    for (int64_t token = 0; token < row.length; token++) {
      int64_t place = ((row.start + token) * groups + group) * size;
      round_to(&room.dk[token * size], dk.data_ptr<BFloat16>() + place, size);
      round_to(&room.dv[token * size], dv.data_ptr<BFloat16>() + place, size);
    }
  });
  return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rlhf, library) {
  library.def("attend_rows(Tensor q, Tensor k, Tensor v, Tensor spans, float scale) -> Tensor");
  library.def(
      "attend_rows_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor spans, float scale)"
      " -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(rlhf, CPU, library) {
  library.impl("attend_rows", attend_rows);
  library.impl("attend_rows_backward", attend_rows_backward);
}
