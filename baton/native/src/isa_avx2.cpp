#include "vec_avx2.h"

#include "attend.h"

namespace baton {

const Kernels& avx2_float32() {
  static const Kernels table = table_of<Float32Panel, float>(product<Float32Panel>);
  return table;
}

const Kernels& avx2_bfloat16() {
  static const Kernels table = table_of<Bf16Panel, float>(product<Bf16Panel>);
  return table;
}

}  // namespace baton
