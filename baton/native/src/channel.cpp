#include "channel.h"

#include <cstring>
#include <new>

#include "check.h"
#include "kernels.h"
#include "wait.h"

namespace baton {
namespace {

constexpr int64_t kMostBytes = int64_t(1) << 34;  // of a buffer
constexpr uint32_t kBuffers = 2;
constexpr const char* kChannelAborted = "the channel was aborted";

struct ChannelHeader {
  alignas(128) std::atomic<uint32_t> aborted;
  Words sender, receiver;
};

constexpr int64_t kHeader = padded(sizeof(ChannelHeader), kPage);

}  // namespace
}  // namespace baton

using namespace baton;

struct BatonChannel {
  const int64_t capacity;
  char* const memory;
  std::atomic<int64_t> waited_ns{0};

  BatonChannel(int64_t most, char* mapped) : capacity(most), memory(mapped) {}

  ChannelHeader& header() const { return *reinterpret_cast<ChannelHeader*>(memory); }
  char* buffer(uint32_t piece) const { return memory + kHeader + piece % kBuffers * padded(capacity, kPage); }

  // copy(buffer, offset in the message, bytes) for each piece of a message, when `other` has done the piece `behind`
  // before it.
  template <class Copy>
  int each_piece(Words& own, Words& other, uint32_t behind, int64_t bytes, Copy copy) {
    const std::atomic<uint32_t>& aborted = header().aborted;
    for (int64_t done = 0; done < bytes; done += capacity) {
      const uint32_t piece = own.arrived.load(std::memory_order_relaxed) + 1, needed = piece - behind;
      if (aborted.load() || (!other.has_arrived(needed) && !wait_for(other, needed, aborted, waited_ns)))
        return fail("%s", kChannelAborted);
      copy(buffer(piece), done, bytes - done < capacity ? bytes - done : capacity);
      own.arrive(piece);
    }
    return 0;
  }
};

int64_t baton_native_channel_bytes(int64_t capacity) { return kHeader + kBuffers * padded(capacity, kPage); }

BatonChannel* baton_native_channel_open(int fd, int64_t capacity) {
  if (capacity < 1 || capacity > kMostBytes)
    return fail("a channel of %lld bytes at once", static_cast<long long>(capacity)), nullptr;
  const int64_t bytes = baton_native_channel_bytes(capacity);
  char* memory = map_shared(fd, bytes, "the channel's memory");
  if (!memory) return nullptr;
  auto* made = new (std::nothrow) BatonChannel(capacity, memory);
  if (made) return made;
  unmap_shared(memory, bytes);
  return fail("no memory for a channel"), nullptr;
}

void baton_native_channel_close(BatonChannel* channel) {
  unmap_shared(channel->memory, baton_native_channel_bytes(channel->capacity));
  delete channel;
}

int baton_native_channel_send(BatonChannel* channel, const void* data, int64_t bytes) {
  ChannelHeader& header = channel->header();
  return channel->each_piece(header.sender, header.receiver, kBuffers, bytes,
                             [&](char* buffer, int64_t offset, int64_t size) {
                               std::memcpy(buffer, static_cast<const char*>(data) + offset, size);
                             });
}

int baton_native_channel_receive(BatonChannel* channel, void* out, int64_t bytes) {
  ChannelHeader& header = channel->header();
  return channel->each_piece(header.receiver, header.sender, 0, bytes,
                             [&](char* buffer, int64_t offset, int64_t size) {
                               std::memcpy(static_cast<char*>(out) + offset, buffer, size);
                             });
}

void baton_native_channel_abort(BatonChannel* channel) {
  ChannelHeader& header = channel->header();
  header.aborted.store(1);
  header.sender.ring();
  header.receiver.ring();
}

int baton_native_channel_aborted(const BatonChannel* channel) { return channel->header().aborted.load() != 0; }

void baton_native_channel_reset(BatonChannel* channel) {
  channel->header().sender.reset();
  channel->header().receiver.reset();
  channel->header().aborted.store(0);
}

int64_t baton_native_channel_waited_ns(const BatonChannel* channel) {
  return channel->waited_ns.load(std::memory_order_relaxed);
}
