// SPDX-License-Identifier: Apache-2.0
// Threads of a kernel as fibers of one thread, in random order; asynchronous copies and products, at any time that they may
// happen. A kernel that waits for what never comes, or reads what nobody waits for, is found out.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include <ucontext.h>

#include "cuda.h"

namespace on_cpu {

struct Barrier {  // of shared memory
  int count = 0, missing = 0, phase = 0;
  int64_t bytes = 0;

  void advance() {
    if (missing == 0 && bytes == 0) phase ^= 1, missing = count;
  }
};

struct Meeting {  // of all threads of a warp, block or cluster
  int size, arrived = 0, turn = 0;
  uint64_t values[32] = {};
};

struct Block {
  int index, rank, left;  // threads that have not ended
  Meeting* cluster;
  std::vector<Block*> peers;  // of the cluster, itself included
  Meeting all;
  std::vector<Meeting> warps;
  std::vector<int64_t> held;  // by warp, until this round
  std::vector<uint8_t> memory;
  std::unordered_map<uint32_t, Barrier> barriers;
};

struct Fiber {
  ucontext_t context;
  std::function<bool()> ready;
  Block* block;
  int thread;
  int turn = 0;                                             // of the cluster, that it arrived in
  std::vector<std::function<void()>> products, in_flight;  // since the last commit, and before
  bool done = false;
};

inline Fiber* current;
inline ucontext_t scheduler;
inline std::mt19937 dice;
inline std::vector<std::function<void()>> copies;  // in flight
inline std::function<void()> body;
inline const char* fault;  // that a device would answer with an error or with other results

inline void demand(bool holds, const char* otherwise) {
  if (!holds && fault == nullptr) fault = otherwise;
}

inline std::vector<std::pair<const uint8_t*, size_t>> readable;  // global memory but for operands and out

inline void demand_readable(const void* p, size_t bytes) {
  const auto from = static_cast<const uint8_t*>(p);
  bool any = false;
  for (const auto& [begin, size] : readable) any |= from >= begin && from + bytes <= begin + size;
  demand(any, "a read beyond the end of scales, biases or offsets");
}

inline void wait_until(std::function<bool()> ready) {
  current->ready = std::move(ready);
  swapcontext(&current->context, &scheduler);
}

inline int arrive(Meeting& at) {
  const int turn = at.turn;
  if (++at.arrived == at.size) at.arrived = 0, ++at.turn;
  return turn;
}
inline void meet(Meeting& at) {
  const int turn = arrive(at);
  wait_until([&at, turn] { return at.turn != turn; });
}
inline Meeting& warp() { return current->block->warps[current->thread / 32]; }

inline void complete(Block* block, uint32_t barrier, int64_t bytes) {
  demand(block->barriers.count(barrier), "a copy completes at a barrier before its block began");
  Barrier& b = block->barriers[barrier];
  b.bytes -= bytes, b.advance();
}

// Run `threads` threads of each of `blocks` blocks in clusters. Returns false where none can go on.
inline bool run(int blocks, int of_cluster, int threads, int bytes, uint32_t seed, std::function<void()> kernel) {
  dice.seed(seed), body = std::move(kernel), fault = nullptr, copies.clear();
  std::vector<std::unique_ptr<Block>> all;
  std::vector<std::unique_ptr<Meeting>> clusters;
  std::vector<std::unique_ptr<Fiber>> fibers;
  constexpr int kStack = 128 << 10;
  std::unique_ptr<uint8_t[]> stacks(new uint8_t[size_t(blocks) * threads * kStack]);
  for (int i = 0; i < blocks; ++i) {
    if (i % of_cluster == 0) clusters.emplace_back(new Meeting{of_cluster * threads});
    all.emplace_back(new Block{i, i % of_cluster, threads, clusters.back().get(), {}, {threads}, {}, {}, {}, {}});
    Block& block = *all.back();
    block.warps.assign(threads / 32, Meeting{32}), block.held.assign(threads / 32, dice() % 256);  // blocks begin apart
    block.memory.resize(bytes);
    for (uint8_t& byte : block.memory) byte = dice();
    for (int t = 0; t < threads; ++t) {
      fibers.emplace_back(new Fiber{{}, [] { return true; }, &block, t});
      ucontext_t& context = fibers.back()->context;
      getcontext(&context);
      context.uc_stack.ss_sp = stacks.get() + (fibers.size() - 1) * kStack, context.uc_stack.ss_size = kStack;
      context.uc_link = &scheduler;
      makecontext(&context, +[] { body(), current->done = true, --current->block->left; }, 0);
    }
  }
  for (auto& block : all)
    for (auto& peer : all)
      if (peer->cluster == block->cluster) block->peers.push_back(peer.get());
  std::vector<Fiber*> left;
  for (auto& fiber : fibers) left.push_back(fiber.get());
  const uint32_t between = 64u << 2 * (dice() % 4);  // copies, of visits to threads
  for (int64_t round = 0; !left.empty(); ++round) {
    bool moved = false;
    if (dice() % 8 == 0) {  // a warp falls behind the others
      Block& block = *all[dice() % all.size()];
      block.held[dice() % block.held.size()] = round + dice() % 64;
    }
    std::shuffle(left.begin(), left.end(), dice);
    for (Fiber* fiber : left) {
      if (!copies.empty() && dice() % between == 0) {
        std::swap(copies[dice() % copies.size()], copies.back());
        const auto copy = std::move(copies.back());
        copies.pop_back(), copy(), moved = true;
      }
      if (fiber->block->held[fiber->thread / 32] > round) {
        moved = true;
        continue;
      }
      if (!fiber->ready()) continue;
      current = fiber, moved = true;
      swapcontext(&scheduler, &fiber->context);
    }
    left.erase(std::remove_if(left.begin(), left.end(), [](Fiber* f) { return f->done; }), left.end());
    if (!moved && copies.empty() && !left.empty()) return false;
  }
  demand(copies.empty(), "a block ends before copies into it");
  return true;
}

}  // namespace on_cpu

struct Index { int x; };
#define threadIdx (Index{on_cpu::current->thread})
#define blockIdx (Index{on_cpu::current->block->index})
inline Index gridDim;

inline void __syncwarp() { on_cpu::meet(on_cpu::warp()); }
inline void __syncthreads() { on_cpu::meet(on_cpu::current->block->all); }

template <class T>
T exchange(T v, int from) {
  static_assert(sizeof(T) <= 8);
  on_cpu::Meeting& warp = on_cpu::warp();
  std::memcpy(&warp.values[on_cpu::current->thread % 32], &v, sizeof(T));
  __syncwarp();
  std::memcpy(&v, &warp.values[from], sizeof(T));
  __syncwarp();
  return v;
}
template <class T>
T __shfl_sync(uint32_t, T v, int lane) { return exchange(v, lane % 32); }
template <class T>
T __shfl_up_sync(uint32_t, T v, int distance) {
  const int lane = on_cpu::current->thread % 32;
  return exchange(v, lane < distance ? lane : lane - distance);
}
inline bool __any_sync(uint32_t, bool v) {
  bool any = false;
  for (int lane = 0; lane < 32; ++lane) any |= exchange(v, lane);
  return any;
}
template <class T>
T __ldg(const T* p) {
  on_cpu::demand_readable(p, sizeof(T));
  return *p;
}

inline void* __cvta_shared_to_generic(uint32_t address) {
  std::vector<uint8_t>& memory = on_cpu::current->block->memory;
  on_cpu::demand(address < memory.size(), "an access beyond shared memory");
  return memory.data() + address;
}
