#pragma once
// c10d::Reducer behind a narrow door: buckets of gradients that are all-reduced while backward goes on.
//
//   reducer.start_forward();                  // a step whose backward averages gradients
//   auto outputs = ...;
//   reducer.expect_backward(outputs);
//   loss.backward();                          // hooks of the parameters do the rest
#include <fsdp/device_mesh.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp::parallel {

struct BucketOptions {
  int64_t bucket_bytes = 0;
  int64_t first_bucket_bytes = 0;
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = false;
  bool static_graph = false;
};

// A parameter that requires grad, once.
struct ReducedTensor {
  std::string path;
  at::Tensor tensor;
  bool has_sparse_gradient = false;
};

class BucketReducer {
 public:
  BucketReducer(std::vector<ReducedTensor> parameters, const ProcessGroup& group, const BucketOptions& options);
  ~BucketReducer();
  BucketReducer(const BucketReducer&) = delete;
  BucketReducer& operator=(const BucketReducer&) = delete;

  // Errors: c10::Error naming the parameters that the last backward did not reach.
  void check_finished() const;
  // Errors: c10::Error naming a parameter that has another dtype or device than when the reducer was made.
  void check_same_kinds() const;
  // What the sum of the gradients of all ranks is divided by, from the next backward on.
  void set_divisor(int64_t divisor);
  // Before a forward whose backward averages. May make other buckets: a collective. Errors: c10::DistError.
  void start_forward();
  // After it. Exchanges tensors in `outputs` where backward has to be noticed at them.
  void expect_backward(std::vector<at::Tensor>& outputs);
  // Whether the next backward is the first one of a static graph. It averages in any case: the reducer counts it as the
  // one to learn from, and would wait for another one for ever.
  [[nodiscard]] bool learns_graph() const;
  // Whether expect_backward() has to know all tensors in what forward returned.
  [[nodiscard]] bool needs_outputs() const;

  // Takes part in the backward of the other ranks, with zeros. Errors: c10::DistError.
  void shadow_backward();

 private:
  class Core;  // shared with the nodes at the outputs
  class Sink;
  std::shared_ptr<Core> core_;
};

// Whether a living reducer has its hooks on `tensor`.
[[nodiscard]] bool is_reduced_already(const at::Tensor& tensor);

}  // namespace fsdp::parallel
