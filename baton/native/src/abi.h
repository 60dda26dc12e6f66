// Symbols of the shared library that its callers see. All others are hidden.
#pragma once

#define BATON_API extern "C" __attribute__((visibility("default")))

// Raise it whenever an exported function, a struct or a meaning changes; `ABI` in library.py follows.
#define BATON_NATIVE_ABI 5

BATON_API int baton_native_abi();

// Hash of the sources that this library was compiled from; the library is used only beside the same sources.
BATON_API const char* baton_native_source_hash();
