// Calls of the library that compute: a forward pass, its head, attention alone.

#include <cstring>
#include <new>

#include "check.h"
#include "forward.h"

namespace baton {
namespace {

bool check_threads(int64_t threads) {
  return (threads >= 1 && threads <= 1024) || (fail("%lld threads", static_cast<long long>(threads)), false);
}

// Attention alone, of the heads in `qkv`.
struct Attend {
  Forward forward;
  int64_t layer;

  static void work(void* context, Region& region, int thread) {
    const Attend& a = *static_cast<const Attend*>(context);
    const Forward& f = a.forward;
    if (f.k.begin_thread) f.k.begin_thread();
    f.compute_angles(region, thread);
    region.barrier();
    f.append(region, thread, a.layer);
    f.attend(region, f.workspace.all, a.layer, f.scratch + thread * f.scratch_size);
    if (f.k.end_thread) f.k.end_thread();
  }
};

int run(const BatonModel& model, const BatonKv* kv, const BatonBatch* batch, const BatonCall& call, int64_t tokens,
        BatonWorkspace& workspace) {
  if (!check_threads(call.threads)) return 1;
  try {
    Forward forward{model, kv, batch, call, kernels(Type(model.type)), workspace, tokens};
    forward.reserve();
    ThreadPool::shared().run(int(call.threads), Forward::work, &forward);
    if (forward.aborted) return fail("%s", kAborted);
    if (batch) workspace.angles_of = forward.lengths();
  } catch (const std::exception& error) {
    return fail("%s", error.what());
  }
  return 0;
}

}  // namespace
}  // namespace baton

using namespace baton;

BatonWorkspace* baton_native_workspace_new() { return new (std::nothrow) BatonWorkspace; }

void baton_native_workspace_free(BatonWorkspace* workspace) { delete workspace; }

int64_t baton_native_workspace_size(const BatonWorkspace* workspace) { return workspace->size(); }

int baton_native_forward(const BatonModel* model, const BatonKv* kv, const BatonBatch* batch, const BatonCall* call,
                         BatonWorkspace* workspace) {
  if (!check_model(*model, *call)) return 1;
  const int64_t tokens = check_batch(*model, *kv, *batch, *call);
  return tokens < 0 ? 1 : run(*model, kv, batch, *call, tokens, *workspace);
}

int baton_native_head(const BatonModel* model, int64_t count, const BatonCall* call, BatonWorkspace* workspace) {
  if (!check_model(*model, *call)) return 1;
  if (count < 1) return fail("%lld rows", static_cast<long long>(count));
  return run(*model, nullptr, nullptr, *call, count, *workspace);
}

int baton_native_attend(const BatonModel* model, const BatonKv* kv, const BatonBatch* batch, int64_t layer,
                        int64_t threads, float* qkv, float* out, BatonWorkspace* workspace) {
  BatonCall call{};
  call.threads = threads;
  call.first = layer;
  call.last = layer + 1;
  const int64_t tokens = check_model(*model, call) ? check_batch(*model, *kv, *batch, call) : -1;
  if (tokens < 0) return 1;
  Attend attend{{*model, kv, batch, call, kernels(Type(model->type)), *workspace, tokens}, layer};
  Forward& f = attend.forward;
  f.reserve();
  f.qkv = qkv;
  ThreadPool::shared().run(int(threads), Attend::work, &attend);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < f.query_width; ++i) {
      const char* from = f.attended + (t * f.query_stride + i) * f.element;
      const uint32_t bits = f.element == 4 ? *reinterpret_cast<const uint32_t*>(from)
                                           : uint32_t(*reinterpret_cast<const Bf16*>(from)) << 16;
      std::memcpy(out + t * f.query_width + i, &bits, sizeof bits);
    }
  return 0;
}

int baton_native_start(int64_t threads) {
  if (!check_threads(threads)) return 1;
  try {
    ThreadPool::shared().start(int(threads));
  } catch (const std::exception& error) {
    return fail("%lld threads can't be started: %s", static_cast<long long>(threads), error.what());
  }
  return 0;
}

int64_t baton_native_rank_floats(int64_t hidden) { return kRowGroup * (hidden > kPanel ? hidden : kPanel); }

int64_t baton_native_tasks() { return ThreadPool::shared().tasks(); }

void baton_native_pin(const int32_t* cores, int64_t count) { ThreadPool::shared().pin(cores, int(count)); }
