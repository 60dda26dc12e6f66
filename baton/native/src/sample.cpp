// The part of sampling that reads whole vocabularies.

#include <exception>

#include "check.h"
#include "kernels.h"
#include "model.h"
#include "thread_pool.h"

namespace baton {
namespace {

constexpr int64_t kTiles = 256;  // of a task

struct LowestNoise {
  const int32_t *first, *keys;
  int64_t tiles, width;
  int32_t* out;
  const Kernels& k;

  static void work(void* context, Region& region, int) {
    const LowestNoise& l = *static_cast<const LowestNoise*>(context);
    for (int64_t begin; (begin = region.take() * kTiles) < l.tiles;)
      for (int64_t i = begin; i < l.tiles && i < begin + kTiles; ++i)
        l.out[i] = l.k.lowest_noise(uint32_t(l.first[i]), int(l.width), uint32_t(l.keys[2 * i]),
                                    uint32_t(l.keys[2 * i + 1]));
  }
};

}  // namespace
}  // namespace baton

using namespace baton;

int baton_native_lowest_noise(const int32_t* first, const int32_t* keys, int64_t tiles, int64_t width, int32_t* out,
                              int64_t threads) {
  LowestNoise all{first, keys, tiles, width, out, kernels(kFloat32)};
  try {
    ThreadPool::shared().run(int(threads), LowestNoise::work, &all);
  } catch (const std::exception& error) {
    return fail("%s", error.what());
  }
  return 0;
}
