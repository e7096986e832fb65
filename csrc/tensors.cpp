#include "tensors.h"

#include <algorithm>

namespace py = pybind11;

namespace offload {
namespace {

std::string shown(dlpack::DataType dtype) {
  static const char* const kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  if (dtype.code == 6) return "bool";
  return (dtype.code < 7 ? kinds[dtype.code] : "type" + std::to_string(dtype.code)) + std::to_string(dtype.bits);
}

Dtype dtype_of(dlpack::DataType dtype) {
  if (dtype.lanes != 1) return Dtype::kNone;
  if (dtype.code == dlpack::kFloat && dtype.bits == 32) return Dtype::kFloat32;
  if (dtype.code == dlpack::kFloat && dtype.bits == 16) return Dtype::kFloat16;
  if (dtype.code == dlpack::kBfloat && dtype.bits == 16) return Dtype::kBFloat16;
  if (dtype.code == dlpack::kInt && dtype.bits == 16) return Dtype::kInt16;
  if (dtype.code == dlpack::kInt && dtype.bits == 8) return Dtype::kInt8;
  if (dtype.code == dlpack::kUInt && dtype.bits == 8) return Dtype::kUInt8;
  return Dtype::kNone;
}

const char* shown(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32: return "float32";
    case Dtype::kBFloat16: return "bfloat16";
    case Dtype::kFloat16: return "float16";
    case Dtype::kInt16: return "int16";
    case Dtype::kInt8: return "int8";
    case Dtype::kUInt8: return "uint8";
    case Dtype::kNone: return "none";
  }
  return "";
}

size_t numel_of(const dlpack::Tensor& tensor) {
  size_t numel = 1;
  for (int32_t d = 0; d < tensor.ndim; ++d) numel *= size_t(tensor.shape[d]);
  return numel;
}

bool contiguous(const dlpack::Tensor& tensor) {
  if (!tensor.strides || numel_of(tensor) == 0) return true;
  int64_t stride = 1;
  for (int32_t d = tensor.ndim - 1; d >= 0; --d) {
    if (tensor.shape[d] != 1 && tensor.strides[d] != stride) return false;
    stride *= tensor.shape[d];
  }
  return true;
}

char* data_of(const dlpack::Tensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

struct Retired {
  std::mutex mutex;
  std::vector<void*> keep;
};

Retired& retired() {
  static Retired* const all = new Retired;  // never destroyed: lanes may outlast static destructors
  return *all;
}

}  // namespace

void Tensors::release(std::vector<void*>& keep) {
  for (void* one : keep) {
    auto* managed = static_cast<dlpack::ManagedTensor*>(one);
    if (managed->deleter) managed->deleter(managed);
  }
  keep.clear();
}

void Tensors::refuse(const std::string& found, const std::string& remedy) const {
  throw KernelError(job_ + ": " + found + ". " + remedy);
}

const dlpack::Tensor& Tensors::open(py::handle tensor, const char* name) {
  static PyObject* const to_dlpack =
      py::object(py::module_::import("torch.utils.dlpack").attr("to_dlpack")).release().ptr();
  auto capsule = py::reinterpret_steal<py::object>(PyObject_CallOneArg(to_dlpack, tensor.ptr()));
  if (!capsule) {
    py::error_already_set error;
    if (!error.matches(PyExc_Exception)) throw error;
    refuse(std::string(name) + " (" + Py_TYPE(tensor.ptr())->tp_name +
               ") cannot be read: " + py::str(error.value()).cast<std::string>(),
           "Pass a dense torch.Tensor in CPU memory.");
  }
  auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (!managed) throw py::error_already_set();
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  keep_.push_back(managed);
  const dlpack::Tensor& found = managed->tensor;
  if (found.device_type != dlpack::kCpu && found.device_type != dlpack::kCudaHost)
    refuse(std::string(name) + " is not in CPU memory (DLPack device type " + std::to_string(found.device_type) + ")",
           "Lanes work on CPU tensors: copy it to the host first.");
  if (!contiguous(found))
    refuse(std::string(name) + " is not contiguous", "Pass a dense tensor; a copy would not be updated.");
  return found;
}

Array Tensors::array(py::handle tensor, const char* name, std::initializer_list<Dtype> allowed) {
  const dlpack::Tensor& found = open(tensor, name);
  const Dtype dtype = dtype_of(found.dtype);
  std::string list;
  for (Dtype one : allowed) {
    if (one == dtype) return {data_of(found), dtype, numel_of(found)};
    list += (list.empty() ? "" : " or ") + std::string(shown(one));
  }
  refuse(std::string(name) + " is " + shown(found.dtype), "It must be " + list + ".");
}

Array Tensors::doubles(py::handle tensor, const char* name, size_t least_numel) {
  const dlpack::Tensor& found = open(tensor, name);
  if (found.dtype.code != dlpack::kFloat || found.dtype.bits != 64)
    refuse(std::string(name) + " is " + shown(found.dtype), "It must be float64.");
  if (numel_of(found) < least_numel)
    refuse(std::string(name) + " has " + std::to_string(numel_of(found)) + " elements",
           "The spans need " + std::to_string(least_numel) + ".");
  return {data_of(found), Dtype::kNone, numel_of(found)};
}

CopySpan Tensors::pair(py::handle dst, py::handle src) {
  const dlpack::Tensor &to = open(dst, "dst"), &from = open(src, "src");
  if (to.dtype.code != from.dtype.code || to.dtype.bits != from.dtype.bits || to.dtype.lanes != from.dtype.lanes)
    refuse("dst is " + shown(to.dtype) + ", src is " + shown(from.dtype),
           "A copy moves raw bytes; use convert for another dtype.");
  if (numel_of(to) != numel_of(from))
    refuse("dst has " + std::to_string(numel_of(to)) + " elements, src has " + std::to_string(numel_of(from)),
           "Pass equal sizes.");
  return {data_of(to), data_of(from), numel_of(to) * ((size_t(to.dtype.bits) * to.dtype.lanes + 7) / 8)};
}

void Tensors::expect_numel(const Array& array, const char* name, size_t numel, const char* why) const {
  if (array.numel != numel)
    refuse(std::string(name) + " has " + std::to_string(array.numel) + " elements",
           "It must have " + std::to_string(numel) + ", " + why + ".");
}

void Tensors::refuse_overlaps(std::vector<Use> uses) const {
  uses.erase(std::remove_if(uses.begin(), uses.end(), [](const Use& use) { return use.nbytes == 0; }), uses.end());
  std::sort(uses.begin(), uses.end(), [](const Use& a, const Use& b) { return a.begin() < b.begin(); });
  const Use *any = nullptr, *written = nullptr;  // those that end last of all before, and of the written ones
  for (const Use& use : uses) {
    const Use* const other = use.written ? any : written;
    if (other && use.begin() < other->end())
      refuse(std::string(other->name) + " and " + use.name + " overlap in memory, and a job that writes one of them has both",
             "Pass separate tensors.");
    if (!any || use.end() > any->end()) any = &use;
    if (use.written && (!written || use.end() > written->end())) written = &use;
  }
}

void retire(std::vector<void*>&& keep) {
  std::lock_guard<std::mutex> lock(retired().mutex);
  auto& all = retired().keep;
  all.insert(all.end(), keep.begin(), keep.end());
  keep.clear();
}

void free_retired() {
  std::vector<void*> keep;
  {
    std::lock_guard<std::mutex> lock(retired().mutex);
    keep.swap(retired().keep);
  }
  Tensors::release(keep);  // outside the mutex: this may run Python code, and that may call in again
}

}  // namespace offload
