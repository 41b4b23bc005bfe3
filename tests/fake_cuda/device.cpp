// A CUDA device without a driver, on torch's CPU build: enough for FakeTensors of device cuda, autograd and FSDP2.
// Nothing is allocated on it or computed. A wait that C++ would begin raises; device.py records those of Python.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <mutex>
#include <unordered_set>

namespace {

const c10::Device FIRST(c10::DeviceType::CUDA, 0);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return FIRST; }
  c10::Device getDevice() const override { return FIRST; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { TORCH_CHECK(false, "torch waits for a stream"); }
  void synchronizeEvent(void*) const override { TORCH_CHECK(false, "torch waits for an event"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { TORCH_CHECK(false, "torch waits for the device"); }

 private:
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, FIRST); }
};

// Host memory that `is_pinned` recognises, as it does with a driver.
struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* data = c10::GetAllocator(c10::DeviceType::CPU)->raw_allocate(n);
    const std::lock_guard<std::mutex> lock(mutex);
    known.insert(data);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  static void release(void* data) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      known.erase(data);
    }
    c10::GetAllocator(c10::DeviceType::CPU)->raw_deallocate(data);
  }
  static inline std::mutex mutex;
  static inline std::unordered_set<const void*> known;
};

Pinned pinned;

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* data) const override {
    const std::lock_guard<std::mutex> lock(Pinned::mutex);
    return Pinned::known.count(data) != 0;
  }
};

// The kernel that scaled_dot_product_attention takes on an H100, by the rules of torch's
// native/transformers/cuda/sdp_utils.cpp that can decide here.
int64_t attention_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double>,
                         bool gqa) {
  auto& context = at::globalContext();
  const bool half = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  const bool groups = q.size(1) != k.size(1) || k.size(1) != v.size(1);
  const bool same_length = q.size(2) == k.size(2);
  for (const auto backend : context.sDPPriorityOrder()) {
    bool works = false;
    if (backend == at::SDPBackend::cudnn_attention) {
      works = context.userEnabledCuDNNSDP() && half && (!groups || gqa) && q.size(3) <= 128 && q.size(3) % 8 == 0 &&
          k.size(2) != 1 && !context.deterministicAlgorithms() && dropout * 16 == static_cast<int>(dropout * 16);
    } else if (backend == at::SDPBackend::flash_attention) {
      works = context.userEnabledFlashSDP() && half && (!groups || gqa) && q.size(3) <= 256 && !mask &&
          (!causal || same_length);
    } else if (backend == at::SDPBackend::efficient_attention) {
      works = context.userEnabledMemEfficientSDP() && !groups && q.size(3) % (half ? 8 : 4) == 0;
    } else if (backend == at::SDPBackend::math) {
      works = context.userEnabledMathSDP();
    }
    if (works) {
      return static_cast<int64_t>(backend);
    }
  }
  TORCH_CHECK(false, "No available kernel");
}

struct Attention {
  Attention() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_kernel); }
} attention;

}  // namespace

namespace at {  // the registry's macro wants an unqualified name
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
