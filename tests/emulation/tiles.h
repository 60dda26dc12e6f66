// The tile registers of AMX: eight for each thread, of 16 rows of 64 bytes at most. What a CPU refuses with a fault,
// such as a tile that is not configured, ends the process with a message.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulation {
namespace {

constexpr int kTiles = 8, kTileRows = 16, kTileBytes = 64;

// As LDTILECFG reads it.
struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64, "LDTILECFG reads 64 bytes");

struct Tile {
  int rows, bytes;
  alignas(64) uint8_t data[kTileRows][kTileBytes];

};

struct Tiles {
  bool configured;
  Tile all[kTiles];
};

static thread_local Tiles tiles;

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "AMX: %s\n", what);
  std::abort();
}

inline Tile& tile_at(int number) {
  require(tiles.configured, "tiles are not configured in this thread");
  require(number >= 0 && number < kTiles && tiles.all[number].rows, "a tile that is not configured");
  return tiles.all[number];
}

inline void load_config(const void* from) {
  TileConfig config;
  std::memcpy(&config, from, sizeof config);
  require(config.palette == 1 && config.start_row == 0, "a palette that is not 1, or a start row");
  for (uint8_t each : config.reserved) require(!each, "reserved bytes are not zero");
  std::memset(&tiles, 0, sizeof tiles);
  for (int i = 0; i < 16; ++i) {
    const int rows = config.rows[i], bytes = config.bytes[i];
    require(i < kTiles || (!rows && !bytes), "a tile beyond the eighth is configured");
    require(rows <= kTileRows && bytes <= kTileBytes && !rows == !bytes, "a tile of a wrong size");
    if (i < kTiles) tiles.all[i].rows = rows, tiles.all[i].bytes = bytes;
  }
  tiles.configured = true;
}

inline void release_tiles() { std::memset(&tiles, 0, sizeof tiles); }

inline void zero_tile(int number) { std::memset(tile_at(number).data, 0, kTileRows * kTileBytes); }

inline void load_tile(int number, const void* from, int64_t stride) {
  Tile& tile = tile_at(number);
  zero_tile(number);
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(tile.data[row], static_cast<const char*>(from) + row * stride, tile.bytes);
}

inline void store_tile(int number, void* to, int64_t stride) {
  Tile& tile = tile_at(number);
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, tile.data[row], tile.bytes);
}

// TDPBF16PS: sums of the first elements of pairs and of the second ones apart, then both are added to what was there.
inline void dot_tiles(int to, int left, int right) {
  Tile &c = tile_at(to), &a = tile_at(left), &b = tile_at(right);
  require(to != left && to != right && left != right, "a tile is given twice");
  require(c.rows == a.rows && c.bytes == b.bytes && a.bytes == 4 * b.rows, "sizes of tiles do not fit");
  require(c.bytes % 32 == 0, "the emulation has whole vectors only");
  for (int row = 0; row < c.rows; ++row)
    for (int column = 0; column < c.bytes; column += 32) {
      __m256 first = _mm256_setzero_ps(), second = _mm256_setzero_ps();
      for (int k = 0; k < b.rows; ++k) {
        int32_t pair;
        std::memcpy(&pair, a.data[row] + 4 * k, sizeof pair);
        const __m256 one = _mm256_castsi256_ps(_mm256_set1_epi32(pair));
        const __m256 line = _mm256_load_ps(reinterpret_cast<const float*>(b.data[k] + column));
        first = multiply_add(first_of_pairs(one), first_of_pairs(line), first);
        second = multiply_add(second_of_pairs(one), second_of_pairs(line), second);
      }
      float* sums = reinterpret_cast<float*>(c.data[row] + column);
      const __m256 added = flush(_mm256_add_ps(first, second));
      _mm256_store_ps(sums, flush(_mm256_add_ps(flush(_mm256_load_ps(sums)), added)));
    }
}

}  // namespace
}  // namespace emulation

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulation::load_config
#define _tile_release emulation::release_tiles
#define _tile_zero emulation::zero_tile
#define _tile_loadd emulation::load_tile
#define _tile_stored emulation::store_tile
#define _tile_dpbf16ps emulation::dot_tiles
