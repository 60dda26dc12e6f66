// One linear of float32 rows.

#include <cstring>

#include "model.h"
#include "thread_pool.h"
#include "workspace.h"

namespace baton {
namespace {

struct Linear {
  const float* x;
  int64_t count, columns;
  const void* packed;
  Type type;
  int64_t rows;
  const float* bias;
  float* out;
  const Kernels& k;
  Buffer buffer{};
  char* converted = nullptr;  // `x` as `product` reads it
  int64_t stride = padded(columns, kInputs), element = k.rows == kFloat32 ? 4 : 2;

  static void work(void* context, Region& region, int) {
    const Linear& l = *static_cast<const Linear*>(context);
    if (l.k.begin_thread) l.k.begin_thread();
    const int64_t panels = (l.rows + kPanel - 1) / kPanel;
    const int64_t block = l.k.row_block, blocks = (l.count + block - 1) / block;
    alignas(64) float sums[kRowBlock * kPanel];
    for (int64_t task; (task = region.take()) < panels * blocks;) {
      const int64_t panel = task / blocks, row = task % blocks * block;
      const int count = int(l.count - row < block ? l.count - row : block);
      const char* weight = static_cast<const char*>(l.packed) + panel * kPanel * l.stride * (l.type == kFloat32 ? 4 : 2);
      l.k.product(l.converted + row * l.stride * l.element, l.stride, count, weight, l.stride, nullptr, sums);
      const int columns = l.rows - panel * kPanel < kPanel ? int(l.rows - panel * kPanel) : kPanel;
      l.k.store(sums, l.bias ? l.bias + panel * kPanel : nullptr, count, columns, l.out + row * l.rows + panel * kPanel,
                l.rows);
    }
    if (l.k.end_thread) l.k.end_thread();
  }
};

}  // namespace
}  // namespace baton

using namespace baton;

void baton_native_linear(const float* x, int64_t count, int64_t columns, const void* packed, int64_t type, int64_t rows,
                         const float* bias, float* out, int64_t threads) {
  Linear linear{x, count, columns, packed, Type(type), rows, bias, out, kernels(Type(type))};
  linear.converted = linear.buffer.reserve_of<char>((count + kRowTile) * linear.stride * linear.element);
  for (int64_t r = 0; r < count; ++r) {
    char* to = linear.converted + r * linear.stride * linear.element;
    linear.k.copy(x + r * columns, columns, to);
  }
  ThreadPool::shared().run(int(threads), Linear::work, &linear);
}
