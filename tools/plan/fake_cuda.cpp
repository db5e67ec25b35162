// The smallest CUDA backend: one device that has neither memory nor kernels, so that PyTorch's autograd accepts tensors
// on it. A build for CPUs has no such backend, and ends the process at the first of them.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::EventFlag, c10::Stream;

struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
};

struct Guard : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

// Preferred to those of a build for CUDA, which ask a driver.
namespace at { C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks) }

// Of guards the last one counts, so it comes after torch with those of its own.
extern "C" void register_guard() { static c10::impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new Guard()); }
