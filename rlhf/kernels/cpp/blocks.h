// What the other files begin with: kernels.py compiles all of them as one text, this one first.
//
// Products are oneDNN's for small blocks (brgemm), in fp32 whatever goes in: the left operand is read as it lies, the
// right one in an order of its own, which `turn` and others make.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <vector>

namespace {

using at::BFloat16;
using at::Tensor;
using at::vec::Vectorized;
using Floats = Vectorized<float>;

template <typename T>
__attribute__((flatten))  // so that whole tiles need no loop: how many rows there are is known
void transpose(const T* from, int64_t rows, int64_t columns, int64_t from_stride, T* to, int64_t to_stride) {
  constexpr int64_t tile = 64 / sizeof(T);
  for (int64_t i = 0; i < rows; i += tile)
    for (int64_t j = 0; j < columns; j += tile) {
      const T* source = from + i * from_stride + j;
      T* target = to + j * to_stride + i;
      auto height = static_cast<int>(std::min(tile, rows - i)), width = static_cast<int>(std::min(tile, columns - j));
      if (height == tile && width == tile)
        at::vec::transpose_mxn<T>(source, from_stride, target, to_stride, tile, tile);
      else
        at::vec::transpose_mxn<T>(source, from_stride, target, to_stride, height, width);
    }
}

// A right operand of `inner` times `columns` from its transpose [columns, inner], whose rows are `stride` apart. Of
// BFloat16 two of the inner dimension stay together: [inner / 2, to_stride, 2].
template <typename T>
void turn(const T* from, int64_t columns, int64_t inner, int64_t stride, T* to, int64_t to_stride) {
  constexpr int64_t together = sizeof(float) / sizeof(T);
  transpose(
      reinterpret_cast<const float*>(from), columns, inner / together, stride / together, reinterpret_cast<float*>(to),
      to_stride);
}

}  // namespace
