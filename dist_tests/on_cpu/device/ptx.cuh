// SPDX-License-Identifier: Apache-2.0
// In place of csrc's: what the products of Hopper use of it, on fibers.
#pragma once

#include "../threads.h"

namespace fsdp_quant::ptx {

using on_cpu::Block;
using on_cpu::current;

constexpr uint32_t kBlockBits = 18;  // a cluster address is rank << 18 | address

inline uint32_t shared_address(const void*) { return 0; }
inline void red_add(float* p, float4 v) { p[0] += v.x, p[1] += v.y, p[2] += v.z, p[3] += v.w; }

inline void mbarrier_init(uint32_t barrier, int count) { current->block->barriers[barrier] = {count, count}; }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(Block* block, uint32_t barrier) {
  on_cpu::demand(block->left > 0 && block->barriers.count(barrier), "arrival at a barrier before or after its block's time");
  on_cpu::Barrier& b = block->barriers[barrier];
  --b.missing, b.advance();
  on_cpu::wait_until([] { return true; });  // others go on first
}
inline void mbarrier_arrive(uint32_t barrier) { mbarrier_arrive(current->block, barrier); }
inline void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
  current->block->barriers.at(barrier).bytes += bytes;
  mbarrier_arrive(barrier);
}
inline uint32_t map_shared(uint32_t address, uint32_t rank) { return rank << kBlockBits | address; }
inline void mbarrier_arrive_remote(uint32_t barrier) {
  mbarrier_arrive(current->block->peers[barrier >> kBlockBits], barrier & ((1 << kBlockBits) - 1));
}
inline bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  const on_cpu::Barrier& b = current->block->barriers.at(barrier);
  on_cpu::wait_until([&b, parity] { return b.phase != static_cast<int>(parity); });
  return true;
}

inline uint32_t cluster_rank() { return current->block->rank; }
inline void cluster_arrive() { current->turn = on_cpu::arrive(*current->block->cluster); }
inline void cluster_wait() {
  on_cpu::wait_until([at = current->block->cluster, turn = current->turn] { return at->turn != turn; });
}
template <int>
void registers_grow() {}
template <int>
void registers_shrink() {}
inline void prefetch_tensor_map(const void*) {}

inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline void copy_tile(uint32_t to, const void* map, int x, int y, int z, uint32_t barrier, std::vector<Block*> blocks) {
  const auto& m = *static_cast<const CUtensorMap*>(map);
  on_cpu::demand(to % 1024 == 0, "a tile is not at a multiple of 1024 bytes");
  for (Block* block : blocks)
    on_cpu::copies.push_back([=] {
      on_cpu::demand(block->left > 0 && to + 128 * m.box_rows <= block->memory.size(), "copy beyond a block's time or memory");
      for (int r = 0; r < m.box_rows; ++r)
        for (int c = 0; c < 128; ++c)
          block->memory[swizzled(to + 128 * r + c)] =
              y + r < m.rows && x + c < m.bytes ? m.data[z * m.plane + (y + r) * m.stride + x + c] : 0;
      on_cpu::complete(block, barrier, 128 * m.box_rows);
    });
}
inline void copy_tile(uint32_t to, const void* map, int x, int y, int z, uint32_t barrier) {
  copy_tile(to, map, x, y, z, barrier, std::vector{current->block});
}
inline void copy_tile(uint32_t to, const void* map, int x, int y, uint32_t barrier) { copy_tile(to, map, x, y, 0, barrier); }
inline void copy_tile_multicast(uint32_t to, const void* map, int x, int y, uint32_t barrier, uint16_t blocks) {
  std::vector<Block*> given;
  for (Block* peer : current->block->peers)
    if (blocks >> peer->rank & 1) given.push_back(peer);
  copy_tile(to, map, x, y, 0, barrier, given);
}
inline void copy_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  on_cpu::demand(to % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0 && bytes % 16 == 0 && bytes > 0,
                 "a bulk copy is not of whole 16 bytes");
  on_cpu::demand_readable(from, bytes);
  on_cpu::copies.push_back([=, block = current->block] {
    on_cpu::demand(block->left > 0 && to + bytes <= block->memory.size(), "copy beyond a block's time or memory");
    std::memcpy(block->memory.data() + to, from, bytes);
    on_cpu::complete(block, barrier, bytes);
  });
}

}  // namespace fsdp_quant::ptx
