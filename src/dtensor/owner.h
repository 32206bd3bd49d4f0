#pragma once
// What the dispatch rules need from whoever keeps the gathered copy of a sharded tensor: a parameter group, or a
// one-off copy of a tensor without group.
#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ArrayRef.h>

#include <memory>
#include <string>

namespace fsdp::dtensor {

class Owner;

// Why a gather is needed, for messages: "aten::mm of layers.0.weight".
struct Reason {
  const char* op;
  const std::string* path;
  [[nodiscard]] std::string str() const { return std::string(op) + " of " + *path; }
};

// Decides which groups are gathered at any time; one for each root.
class Scheduler {
 public:
  virtual ~Scheduler() = default;
  // Makes all of `owners` gathered at once; they are the ones that a single op needs.
  virtual void touch(c10::ArrayRef<Owner*> owners, const Reason& reason) = 0;
};

// In what dtype gathered() answers.
struct Precision {
  at::ScalarType dtype;
  bool is_lowered = false;  // not the shard's own: for compute only. Writes and reads of values use the shards
  std::optional<at::ScalarType> compute_dtype = std::nullopt;  // activations that meet it, and itself, are cast to
};

class Owner {
 public:
  virtual ~Owner() = default;
  [[nodiscard]] virtual Scheduler& scheduler() = 0;
  // The gathered tensor behind `handle`, part of the autograd graph when the handle requires grad and grad mode is on.
  [[nodiscard]] virtual at::Tensor gathered(int index, const at::Tensor& handle) = 0;
  // An op wrote to the gathered tensor: takes this rank's part over into the shard.
  virtual void write_back(int index) = 0;
  // The shard was replaced by one of another dtype or device (Module::to).
  virtual void replaced(int index) = 0;
  [[nodiscard]] virtual const std::string& path(int index) const = 0;
  [[nodiscard]] virtual Precision precision(int index) const = 0;
};

// The storage of a gathered tensor and of all its views. Without bytes while its owner is resharded.
class GatheredStorage : public c10::StorageImpl {
 public:
  GatheredStorage(std::shared_ptr<Owner> owner, int index, size_t nbytes, c10::DataPtr data);
  void fill(c10::DataPtr data, size_t nbytes);
  void release();
  void release_resources() override;

  std::shared_ptr<Owner> owner;
  const int index;
};

// The one place that finds the group of a view or saved tensor; null for every other tensor.
[[nodiscard]] GatheredStorage* gathered_storage_of(const at::Tensor& tensor);

// A tensor of `handle`'s sizes over `storage`, carrying the wrapper key and `handle`'s version counter: a write to
// either is seen by autograd on both.
[[nodiscard]] at::Tensor make_gathered(c10::intrusive_ptr<GatheredStorage> storage, const at::Tensor& handle,
                                       at::ScalarType dtype);

}  // namespace fsdp::dtensor
