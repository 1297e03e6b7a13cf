// Runs all_reduce over the peer memory of GPUs of one host and one process. x of all ranks, bias and residual are added
// in float32 in the order of ranks and rounded once. So every rank has the same bits, whatever the size.
//
// Each rank has one buffer, which the others write to. A block is a lane: lane b of a rank exchanges with lane b of the
// others, on its own parts of the buffers. Its counter lies on the device, so that a launch may be replayed.
// tests/kernels/test_all_reduce_protocol.py tries all orders of the two ways:
//
// one_shot  A rank writes its x to all others. A word that has arrived is not kNothing, a NaN that no x is sent with. So
//           neither flags nor fences are needed. Who has read it writes kNothing in its place. Rounds take turns in two
//           places. A rank writes to one again only when it has received the others' words of the round between. They
//           sent these once they had read the words before.
// two_shot  A rank sums its share of x, and sends that to all. Each shot is behind a flag that counts rounds. Either
//           shot tells that the other before it was read. For more than two ranks it moves fewer bytes.
//
// One exchange at a time may run between the same GPUs: each must depend on the one before. A rank that waits longer
// than its limit stops its program with an error.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

constexpr int kRanks = 8;          // the most
constexpr int kLanes = 128;        // the most blocks of a launch; all must find a place beside each other
constexpr int kOneThreads = 256;
constexpr int kAhead = 4;          // packs (16 bytes) that a thread sends before it waits
constexpr int kOnePacks = kOneThreads * kAhead;  // of a lane's round
constexpr int kTwoThreads = 512;
constexpr int kTwoPacks = 1024;    // of a rank's share of a lane's round, the most
constexpr uint32_t kNothing = 0xffffffff;  // two NaNs of 16 bits, or one of 32

// Holds a rank's buffer. The counters are its own; all else is written by others, [.., source, ..].
struct Layout {
  size_t ranks;
  __host__ __device__ size_t flags() const { return 2 * kLanes * sizeof(uint32_t); }
  __host__ __device__ size_t one() const { return flags() + 2 * kLanes * kRanks * sizeof(uint32_t); }
  __host__ __device__ size_t two() const { return one() + 2 * ranks * kLanes * kOnePacks * sizeof(uint4); }
  __host__ __device__ size_t bytes() const { return two() + 2 * ranks * kLanes * kTwoPacks * sizeof(uint4); }
};

struct Exchange {
  char* buffers[kRanks];
  int rank, ranks;
  unsigned long long limit;  // nanoseconds

  __device__ uint32_t* counter(int kind) const {
    return reinterpret_cast<uint32_t*>(buffers[rank]) + kind * kLanes + blockIdx.x;
  }
  __device__ uint32_t* flag(int owner, int shot, int source) const {
    auto* flags = reinterpret_cast<uint32_t*>(buffers[owner] + Layout{size_t(ranks)}.flags());
    return flags + (shot * kLanes + blockIdx.x) * kRanks + source;
  }
  __device__ uint4* one(int owner, uint32_t turn, int source) const {
    auto* packs = reinterpret_cast<uint4*>(buffers[owner] + Layout{size_t(ranks)}.one());
    return packs + (size_t((turn & 1) * ranks + source) * kLanes + blockIdx.x) * kOnePacks;
  }
  __device__ uint4* two(int owner, int shot, int source) const {
    auto* packs = reinterpret_cast<uint4*>(buffers[owner] + Layout{size_t(ranks)}.two());
    return packs + (size_t(shot * ranks + source) * kLanes + blockIdx.x) * kTwoPacks;
  }
};

__device__ uint4 load(const uint4* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

__device__ void store(uint4* p, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ uint32_t sendable(uint32_t word) { return word == kNothing ? kNothing - 1 : word; }
__device__ uint4 sendable(uint4 v) { return make_uint4(sendable(v.x), sendable(v.y), sendable(v.z), sendable(v.w)); }
__device__ bool arrived(uint4 v) { return v.x != kNothing && v.y != kNothing && v.z != kNothing && v.w != kNothing; }

__device__ unsigned long long now() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Stops the program once a wait has lasted longer than it may.
struct Patience {
  unsigned long long limit, start = 0;
  unsigned turns = 0;
  __device__ void wait() {
    if (++turns % 4096) return;
    if (!start) start = now();
    else if (now() - start > limit) __trap();
  }
};

template <typename T>
struct Pack {
  static constexpr int kSize = 16 / sizeof(T);
  float values[kSize];

  Pack() = default;
  __device__ explicit Pack(uint4 bits) {
    const T* own = reinterpret_cast<const T*>(&bits);
    for (int i = 0; i < kSize; ++i) values[i] = static_cast<float>(own[i]);
  }
  __device__ void add(uint4 bits) {
    Pack other(bits);
    for (int i = 0; i < kSize; ++i) values[i] += other.values[i];
  }
  __device__ uint4 rounded() const {
    uint4 bits;
    T* own = reinterpret_cast<T*>(&bits);
    for (int i = 0; i < kSize; ++i) own[i] = static_cast<T>(values[i]);
    return bits;
  }
};

struct Operands {
  const uint4* x;
  const uint4* bias;      // of one row, or null
  const uint4* residual;  // or null
  uint4* out;
  long packs;     // of x
  long row_packs;
};

// Returns pack i of the result, of the ranks' sum: with what counts once.
template <typename T>
__device__ uint4 finished(const Operands& o, Pack<T> sum, long i) {
  if (o.bias) sum.add(o.bias[i % o.row_packs]);
  if (o.residual) sum.add(o.residual[i]);
  return sum.rounded();
}

// Takes the packs of a round that a source sent, one in kOneThreads for each thread, and leaves nothing.
__device__ void receive(uint4* parts, uint4* places, int count, unsigned long long limit) {
  const uint4 nothing = make_uint4(kNothing, kNothing, kNothing, kNothing);
  Patience patience{limit};
  bool all = false;
  while (!all) {
    all = true;
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (u * kOneThreads + int(threadIdx.x) >= count) continue;
      parts[u] = load(places + u * kOneThreads);
      all = all && arrived(parts[u]);
    }
    if (!all) patience.wait();
  }
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
    if (u * kOneThreads + int(threadIdx.x) < count) store(places + u * kOneThreads, nothing);
  }
}

// Returns the sum of pack i: each rank's part in order, then what counts once.
template <typename T, typename Part>
__device__ uint4 total(const Operands& o, int ranks, long i, Part part) {
  Pack<T> sum(part(0));
  for (int source = 1; source < ranks; ++source) sum.add(part(source));
  return finished(o, sum, i);
}

// A thread has the same places in every round. So what it sends tells that it has read what was there before.
template <typename T>
__global__ void __launch_bounds__(kOneThreads)
    one_shot(const __grid_constant__ Operands o, const __grid_constant__ Exchange e) {
  uint32_t turn = *e.counter(0);
  const long each = (o.packs + gridDim.x - 1) / gridDim.x, begin = each * blockIdx.x;
  const long end = min(begin + each, o.packs);
  for (long first = begin; first < end; first += kOnePacks) {
    ++turn;
    uint4 own[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int at = u * kOneThreads + threadIdx.x;
      if (first + at >= end) continue;
      own[u] = sendable(o.x[first + at]);
      for (int k = 1; k < e.ranks; ++k) {
        int peer = e.rank + k;
        if (peer >= e.ranks) peer -= e.ranks;
        store(e.one(peer, turn, e.rank) + at, own[u]);
      }
    }
    Pack<T> sums[kAhead];
    for (int source = 0; source < e.ranks; ++source) {
      uint4 parts[kAhead];
      uint4* places = e.one(e.rank, turn, source) + threadIdx.x;
      if (source != e.rank) receive(parts, places, int(min(end - first, long(kOnePacks))), e.limit);
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const uint4 part = source == e.rank ? own[u] : parts[u];
        if (source) sums[u].add(part);
        else sums[u] = Pack<T>(part);
      }
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const long i = first + u * kOneThreads + threadIdx.x;
      if (i < end) o.out[i] = finished(o, sums[u], i);
    }
    if (first + kOnePacks < end) {  // else the kernel's end is both
      __threadfence_system();
      __syncthreads();  // a thread without packs in the last round learns by the others that a peer has read its last
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) *e.counter(0) = turn;
}

// Tells all other ranks that this lane's stores of a round's shot are done, and waits for theirs.
__device__ void meet(const Exchange& e, uint32_t turn, int shot) {
  __syncthreads();
  const int peer = threadIdx.x;
  if (peer < e.ranks && peer != e.rank) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(e.flag(peer, shot, e.rank)), "r"(turn) : "memory");
    uint32_t found;
    Patience patience{e.limit};
    while (true) {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(e.flag(e.rank, shot, peer)) : "memory");
      if (found == turn) break;
      patience.wait();
    }
  }
  __syncthreads();
}

template <typename T>
__global__ void __launch_bounds__(kTwoThreads)
    two_shot(const __grid_constant__ Operands o, const __grid_constant__ Exchange e, int share) {
  uint32_t turn = *e.counter(1);
  const long round = long(e.ranks) * share;
  for (long first = round * blockIdx.x; first < o.packs; first += round * gridDim.x) {
    ++turn;
    for (int k = 1; k < e.ranks; ++k) {
      const int peer = (e.rank + k) % e.ranks;
      const long begin = first + long(peer) * share;
      const int count = int(min(long(share), o.packs - begin));
      uint4* to = e.two(peer, 0, e.rank);
      for (int i = threadIdx.x; i < count; i += kTwoThreads) to[i] = o.x[begin + i];
    }
    meet(e, turn, 0);
    const long own = first + long(e.rank) * share;
    const int count = int(min(long(share), o.packs - own));
    for (int i = threadIdx.x; i < count; i += kTwoThreads) {
      const uint4 sum = total<T>(o, e.ranks, own + i, [&](int source) {
        return source == e.rank ? o.x[own + i] : __ldcg(e.two(e.rank, 0, source) + i);
      });
      o.out[own + i] = sum;
      for (int k = 1; k < e.ranks; ++k) e.two((e.rank + k) % e.ranks, 1, e.rank)[i] = sum;
    }
    meet(e, turn, 1);
    for (int k = 1; k < e.ranks; ++k) {
      const int peer = (e.rank + k) % e.ranks;
      const long begin = first + long(peer) * share;
      const int count = int(min(long(share), o.packs - begin));
      const uint4* from = e.two(e.rank, 1, peer);
      for (int i = threadIdx.x; i < count; i += kTwoThreads) o.out[begin + i] = __ldcg(from + i);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) *e.counter(1) = turn;
}

template <typename T>
cudaError_t launch(const Operands& o, const Exchange& e, bool once, cudaStream_t stream) {
  if (once) {
    const int lanes = int(std::min<long>(kLanes, (o.packs + kOneThreads - 1) / kOneThreads));
    one_shot<T><<<lanes, kOneThreads, 0, stream>>>(o, e);
  } else {
    const long even = (o.packs + long(kLanes) * e.ranks - 1) / (long(kLanes) * e.ranks);
    const int share = int(std::min<long>(kTwoPacks, even));
    const long rounds = (o.packs + long(e.ranks) * share - 1) / (long(e.ranks) * share);
    two_shot<T><<<int(std::min<long>(kLanes, rounds)), kTwoThreads, 0, stream>>>(o, e, share);
  }
  return cudaGetLastError();
}

// Holds the buffers of GPUs that exchange, made once in a process.
struct Group {
  std::vector<int64_t> devices;
  char* buffers[kRanks] = {};
};

ffi::Error failed(const std::string& what, cudaError_t why) {
  return ffi::Error::Internal("all_reduce over peer memory: " + what + ": " + cudaGetErrorString(why));
}

cudaError_t load_kernels() {
  cudaFuncAttributes found;
  for (const void* kernel : {(const void*)one_shot<float>, (const void*)one_shot<half>,
                             (const void*)one_shot<nv_bfloat16>, (const void*)two_shot<float>,
                             (const void*)two_shot<half>, (const void*)two_shot<nv_bfloat16>}) {
    if (cudaError_t error = cudaFuncGetAttributes(&found, kernel)) return error;
  }
  return cudaSuccess;
}

ffi::Error make_group(Group& group) {
  const auto& devices = group.devices;
  const size_t bytes = Layout{devices.size()}.bytes();
  for (size_t r = 0; r < devices.size(); ++r) {
    if (cudaError_t error = cudaSetDevice(int(devices[r]))) return failed("device " + std::to_string(devices[r]), error);
    if (cudaError_t error = load_kernels()) return failed("its kernels", error);
    for (int64_t peer : devices) {
      if (peer == devices[r]) continue;
      int reaches = 0;
      cudaError_t error = cudaDeviceCanAccessPeer(&reaches, int(devices[r]), int(peer));
      const std::string pair = "GPUs " + std::to_string(devices[r]) + " and " + std::to_string(peer);
      if (error || !reaches) return failed(pair + " cannot reach each other's memory", error);
      error = cudaDeviceEnablePeerAccess(int(peer), 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
      else if (error) return failed(pair, error);
    }
    cudaError_t error = cudaMalloc(&group.buffers[r], bytes);
    const Layout layout{devices.size()};
    if (!error) error = cudaMemset(group.buffers[r], 0, layout.one());
    if (!error) error = cudaMemset(group.buffers[r] + layout.one(), 0xff, bytes - layout.one());  // kNothing
    if (!error) error = cudaDeviceSynchronize();
    if (error) return failed("a buffer of " + std::to_string(bytes >> 20) + " MiB", error);
  }
  return ffi::Error::Success();
}

// Sets the group of these devices, which stays until the process ends.
ffi::Error find_group(ffi::Span<const int64_t> devices, const Group** found) {
  static std::mutex mutex;
  static std::vector<std::unique_ptr<Group>> groups;
  if (devices.size() > kRanks) return ffi::Error::InvalidArgument("all_reduce over peer memory: at most 8 GPUs");
  std::lock_guard<std::mutex> lock(mutex);
  const std::vector<int64_t> wanted(devices.begin(), devices.end());
  for (const auto& group : groups) {
    if (group->devices == wanted) {
      *found = group.get();
      return ffi::Error::Success();
    }
  }
  auto group = std::make_unique<Group>();
  group->devices = wanted;
  int before = 0;
  cudaGetDevice(&before);
  ffi::Error error = make_group(*group);
  cudaSetDevice(before);
  if (error.failure()) return error;
  *found = group.get();
  groups.push_back(std::move(group));
  return ffi::Error::Success();
}

ffi::Error initialize(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attributes) {
  auto devices = attributes.get<ffi::Span<const int64_t>>("devices");
  if (devices.has_error()) return devices.error();
  const Group* found;
  return find_group(*devices, &found);
}

// x, then bias and residual where has_bias and has_residual; once: in one shot.
ffi::Error execute(cudaStream_t stream, int32_t device, ffi::RemainingArgs arguments, ffi::Result<ffi::AnyBuffer> out,
                   ffi::Span<const int64_t> devices, int32_t has_bias, int32_t has_residual, int32_t once,
                   int64_t limit) {
  const Group* group;
  if (ffi::Error error = find_group(devices, &group); error.failure()) return error;
  Exchange e{};
  e.ranks = int(devices.size());
  e.rank = -1;
  e.limit = static_cast<unsigned long long>(limit);
  for (int r = 0; r < e.ranks; ++r) {
    e.buffers[r] = group->buffers[r];
    if (devices[r] == device) e.rank = r;
  }
  if (e.rank < 0) return ffi::Error::InvalidArgument("all_reduce over peer memory: GPU " + std::to_string(device) + " is not one of its devices");
  const void* given[3] = {};
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto buffer = arguments.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    given[i] = buffer->untyped_data();
  }
  Operands o{};
  o.x = static_cast<const uint4*>(given[0]);
  o.bias = static_cast<const uint4*>(has_bias ? given[1] : nullptr);
  o.residual = static_cast<const uint4*>(has_residual ? given[1 + has_bias] : nullptr);
  o.out = static_cast<uint4*>(out->untyped_data());
  o.packs = long(out->size_bytes() / 16);
  const auto dimensions = out->dimensions();
  const long rows = dimensions.size() > 1 ? long(out->element_count()) / dimensions.back() : 1;
  o.row_packs = o.packs / rows;
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device);
  cudaError_t error = cudaErrorInvalidValue;
  switch (out->element_type()) {
    case ffi::DataType::F32: error = launch<float>(o, e, once, stream); break;
    case ffi::DataType::F16: error = launch<half>(o, e, once, stream); break;
    case ffi::DataType::BF16: error = launch<nv_bfloat16>(o, e, once, stream); break;
    default: break;
  }
  cudaSetDevice(before);
  return error ? failed("launch", error) : ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(peer_all_reduce_initialize, initialize,
                              ffi::Ffi::BindInitialize().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(peer_all_reduce, execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<ffi::Span<const int64_t>>("devices")
                                  .Attr<int32_t>("has_bias")
                                  .Attr<int32_t>("has_residual")
                                  .Attr<int32_t>("once")
                                  .Attr<int64_t>("limit"),
                              {ffi::Traits::kCmdBufferCompatible});

// Returns whether a GPU reaches another's memory.
extern "C" int peer_can_access(int from, int to) {
  int found = 0;
  return cudaDeviceCanAccessPeer(&found, from, to) == cudaSuccess && found;
}
