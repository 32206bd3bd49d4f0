// Lesson 4: activation checkpointing. The same sharded Transformer does one step twice: as it is, and with each block
// run again in backward. Gradients are equal, dropout included; the bytes that autograd keeps between forward and
// backward are counted.
//
//   fsdp run --nproc-per-node 2 -- 04_activation_checkpointing
#include <fsdp/fsdp.h>

#include <iostream>
#include <set>

#include "common/lesson.h"
#include "common/transformer.h"

namespace {

using lesson::require;

// The forward of lesson::Transformer, with one line for another (*).
at::Tensor forward(lesson::Transformer& model, const at::Tensor& tokens, bool checkpointed) {
  auto h = model->tok_embeddings->forward(tokens) + model->pos_embeddings->forward(torch::arange(tokens.size(1)));
  for (size_t i = 0; i < model->layers->size(); ++i) {
    const auto block = model->layers->ptr<lesson::TransformerBlockImpl>(i);
    h = checkpointed ? fsdp::checkpoint(block, h) : block->forward(h);  // (*)
  }
  return model->output->forward(model->norm->forward(h));
}

// Counts what autograd saves while the scope lives, each storage once. Gathered parameters are not among it: they are
// freed after forward and gathered again.
class SavedBytes {
 public:
  [[nodiscard]] int64_t count() const { return count_; }

 private:
  fsdp::SavedTensorHooks::Unpack pack(const at::Tensor& x) {
    if (seen_.insert(x.storage().unsafeGetStorageImpl()).second) count_ += static_cast<int64_t>(x.storage().nbytes());
    return [x] { return x; };
  }
  int64_t count_ = 0;
  std::set<const void*> seen_;
  fsdp::SavedTensorHooks hooks_{[this](const at::Tensor& x) { return pack(x); }};
};

struct Step {
  int64_t saved_bytes;
  std::vector<at::Tensor> gradients;  // this rank's parts
};

Step do_step(lesson::Transformer& model, const at::Tensor& tokens, bool checkpointed) {
  torch::manual_seed(1 + fsdp::rank());  // dropout differs between ranks, and is the same in both steps
  const SavedBytes saved;
  const auto loss = forward(model, tokens, checkpointed).square().mean();
  Step step{saved.count(), {}};
  loss.backward();
  for (const auto& parameter : model->parameters()) {
    step.gradients.push_back(fsdp::DTensor(parameter.grad()).to_local().clone());
  }
  model->zero_grad();
  return step;
}

void teach() {
  fsdp::init_process_group();
  const auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::world_size()}, {"dp"});
  const lesson::ModelArgs args{.num_layers = 4, .vocab_size = 32, .max_seq_len = 32, .dim = 32, .dropout = 0.1};
  torch::manual_seed(0);
  lesson::Transformer model(args);
  for (const auto& layer : *model->layers) fsdp::fully_shard(layer, {.mesh = mesh});
  fsdp::fully_shard(model, {.mesh = mesh});

  torch::manual_seed(100 + fsdp::rank());
  const auto tokens = torch::randint(args.vocab_size, {4, args.max_seq_len});
  const auto plain = do_step(model, tokens, /*checkpointed=*/false);
  const auto checkpointed = do_step(model, tokens, /*checkpointed=*/true);

  std::cout << "rank " << fsdp::rank() << ": autograd keeps " << plain.saved_bytes << " bytes, with checkpoints "
            << checkpointed.saved_bytes << ": " << plain.saved_bytes - checkpointed.saved_bytes << " bytes saved"
            << std::endl;
  require(2 * checkpointed.saved_bytes <= plain.saved_bytes, "checkpoints halve what autograd keeps");
  for (size_t i = 0; i < plain.gradients.size(); ++i) {
    require(at::equal(plain.gradients[i], checkpointed.gradients[i]), "gradients are the same, bit by bit");
  }
  if (fsdp::rank() == 0) {
    std::cout << "lesson 4 done: less kept, the same gradients, on " << fsdp::world_size() << " ranks" << std::endl;
  }
  fsdp::destroy_process_group();
}

}  // namespace

int main() { return lesson::run(teach); }
