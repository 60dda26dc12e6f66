// The instruction sets that kernels are written for, and the one that runs.
//
// A file isa_*.cpp is compiled with the flags of its instruction set (baton/native/build.py), all others with none: no
// other file may contain such instructions, because it runs on every CPU. The linker keeps one copy of each inline
// function or template with external linkage, perhaps the one of the newest instruction set. So whatever such a file
// shares with others, headers of the standard library included, must be in an anonymous namespace, `static` or
// `always_inline` there.
#pragma once

#include "abi.h"

namespace baton {

// In order: a CPU that has one has all before it. `build.py` has the same order, and gives every file the newest that
// could be compiled as BATON_NEWEST_ISA; a file of a newer one is not in the library.
enum class Isa : int { kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmx };
inline constexpr int kIsas = 5;

// The best one of this CPU that the kernel of the operating system also supports.
Isa best_isa();

// The one whose kernels run: the best, or the one before it if that is faster on this CPU, unless
// `baton_native_select_isa` chose another one.
Isa selected_isa();

}  // namespace baton

// Name of the selected one: "scalar", "avx2", "avx512", "avx512_bf16" or "amx".
BATON_API const char* baton_native_isa();

// Name of the best one of this machine.
BATON_API const char* baton_native_best_isa();

// Select one by name, for tests. 0: done, 1: unknown name, 2: this machine does not have it. Nothing may be computing.
BATON_API int baton_native_select_isa(const char* name);
