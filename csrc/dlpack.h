// The part of the DLPack 0.x structures that the binding reads (https://dmlc.github.io/dlpack). Layout is ABI: do not
// reorder.
#pragma once

#include <stdint.h>

namespace dlpack {

enum DeviceType : int32_t { kCpu = 1, kCudaHost = 3 };
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4 };

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // nullptr when compact
  uint64_t byte_offset;
};

struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

}  // namespace dlpack
