#include "abi.h"

#ifndef BATON_NATIVE_SOURCE_HASH
#error "compile with `python -m baton.native.build`, which gives the hash of the sources"
#endif

int baton_native_abi() { return BATON_NATIVE_ABI; }

const char* baton_native_source_hash() { return BATON_NATIVE_SOURCE_HASH; }
