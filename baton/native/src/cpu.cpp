#include "cpu.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace baton {
namespace {

constexpr const char* kNames[kIsas] = {"scalar", "avx2", "avx512", "avx512_bf16", "amx"};

#if defined(BATON_EMULATE)

// For tests: what the CPU lacks is emulated (tests/emulation).
Isa detect() { return Isa::kAmx; }

bool has_slow_dots() { return false; }

#elif defined(__x86_64__)

bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kAmxBf16) || !(d & kAmxTile)) return false;
  // A process must ask Linux for the tile registers (https://docs.kernel.org/arch/x86/xstate.html). Linux refuses if it
  // does not save them, so this also tests the operating system.
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

// Intel's cores with AVX512-FP16 multiply bfloat16 in their tiles. Where a hypervisor hides these, VDPBF16PS remains,
// which takes four times as long as a VFMADD231PS with half as many products (0.75 ns and 0.19 on Emerald Rapids).
// Cores of AMD, and Intel's first one with VDPBF16PS, which has no AVX512-FP16, are faster with it.
bool has_slow_dots() {
  constexpr unsigned kAvx512Fp16 = 1u << 23;
  unsigned a, b, c, d;
  return __builtin_cpu_is("intel") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAvx512Fp16);
}

// __builtin_cpu_supports also asks whether the operating system saves the registers.
Isa detect() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) return Isa::kScalar;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return Isa::kAvx2;
  if (!__builtin_cpu_supports("avx512bf16")) return Isa::kAvx512;
  // Asked last, because the permission has a price: the kernel then saves 8 KiB more for each thread that uses tiles.
  return BATON_NEWEST_ISA >= static_cast<int>(Isa::kAmx) && has_amx() ? Isa::kAmx : Isa::kAvx512Bf16;
}

#else

Isa detect() { return Isa::kScalar; }

bool has_slow_dots() { return false; }

#endif

// Of the machine and of this library: an old compiler lacks the flags of a newer instruction set.
Isa find_best() { return std::min(detect(), Isa{BATON_NEWEST_ISA}); }

std::atomic<Isa>& selection() {
  static std::atomic<Isa> selected{best_isa() == Isa::kAvx512Bf16 && has_slow_dots() ? Isa::kAvx512 : best_isa()};
  return selected;
}

const char* name_of(Isa isa) { return kNames[static_cast<int>(isa)]; }

}  // namespace

Isa best_isa() {
  static const Isa best = find_best();
  return best;
}

Isa selected_isa() { return selection().load(std::memory_order_relaxed); }

}  // namespace baton

const char* baton_native_isa() { return baton::name_of(baton::selected_isa()); }

const char* baton_native_best_isa() { return baton::name_of(baton::best_isa()); }

int baton_native_select_isa(const char* name) {
  for (int each = 0; each < baton::kIsas; ++each) {
    if (std::strcmp(name, baton::kNames[each]) != 0) continue;
    if (each > static_cast<int>(baton::best_isa())) return 2;
    baton::selection().store(static_cast<baton::Isa>(each), std::memory_order_relaxed);
    return 0;
  }
  return 1;
}
