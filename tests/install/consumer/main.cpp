// One training step, sharded over a group of one rank: everything that linking could have lost is needed for it.
#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <iostream>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

int main() {
  const auto group = fsdp::make_process_group(c10::make_intrusive<c10d::HashStore>(), /*rank=*/0, /*size=*/1);
  const auto mesh = fsdp::DeviceMesh::from_group(group, torch::kCPU, {"dp"});
  torch::nn::Linear model(4, 3);
  fsdp::fully_shard(model, {.mesh = mesh});
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.1);

  const auto before = fsdp::DTensor(model->weight).to_local().clone();
  model->forward(torch::ones({2, 4})).sum().backward();
  optimizer.step();
  const auto after = fsdp::DTensor(model->weight).to_local();

  if (!torch::allclose(after, before - 0.2)) {  // the gradient of every weight is 2
    std::cout << "wrong weights after the step:\n" << after << "\n";
    return 1;
  }
  std::cout << "trained sharded over " << group->getSize() << " rank\n";
  return 0;
}
