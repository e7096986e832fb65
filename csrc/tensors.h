// Tensors as the binding takes them: read through DLPack, checked, and kept alive until a job is done.
#pragma once

#include <pybind11/pybind11.h>

#include "dlpack.h"
#include "jobs.h"

namespace offload {

// A refused call or a failed job; becomes offload_engine.errors.KernelError.
struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The tensors of one job. Needs the interpreter lock throughout.
class Tensors {
 public:
  explicit Tensors(std::string job) : job_(std::move(job)) {}
  ~Tensors() { release(keep_); }
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  // The tensor's memory; `allowed` lists the dtypes that the job takes here.
  Array array(pybind11::handle tensor, const char* name, std::initializer_list<Dtype> allowed);
  Array doubles(pybind11::handle tensor, const char* name, size_t least_numel);
  // Any dtype; raises unless both have the same one and the same number of elements.
  CopySpan pair(pybind11::handle dst, pybind11::handle src);

  [[noreturn]] void refuse(const std::string& found, const std::string& remedy) const;
  void expect_numel(const Array& array, const char* name, size_t numel, const char* why = "as the first tensor") const;

  struct Use {
    const char* name;
    const void* data;
    size_t nbytes;
    bool written;
    uintptr_t begin() const { return reinterpret_cast<uintptr_t>(data); }
    uintptr_t end() const { return begin() + nbytes; }
  };
  // Raises when what the job writes overlaps anything else that it has.
  void refuse_overlaps(std::vector<Use> uses) const;
  const std::string& job() const { return job_; }
  std::vector<void*> take_keep() { return std::move(keep_); }

  static void release(std::vector<void*>& keep);

 private:
  const dlpack::Tensor& open(pybind11::handle tensor, const char* name);
  const std::string job_;
  std::vector<void*> keep_;
};

// Memory of finished jobs, handed over by the lanes' threads. Freed under the interpreter lock by whoever next calls
// in, because freeing a tensor may run Python code.
void retire(std::vector<void*>&& keep);
void free_retired();

}  // namespace offload
