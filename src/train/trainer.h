#pragma once
// The training loop of `fsdp train`: AdamW with warm-up and cosine, clipping, accumulation, validation, a sample.
//
//   Trainer trainer(options, corpus, World::from_environment(), std::cout, /*is_terminal=*/false);
//   trainer.run();
#include <torch/optim/adamw.h>

#include <chrono>
#include <memory>
#include <ostream>
#include <string>

#include "train/batches.h"
#include "train/corpus.h"
#include "train/evaluate.h"
#include "train/gpt.h"
#include "train/progress.h"
#include "train/schedule.h"
#include "train/world.h"

namespace fsdp::train {

struct TrainOptions {
  GPTOptions model;
  ScheduleOptions schedule{.peak = 3e-3, .min_factor = 0.1, .warmup_steps = 20, .num_steps = 500};
  int64_t batch_size = 32;                  // sequences an optimizer step, over all ranks
  int64_t gradient_accumulation_steps = 1;  // backwards an optimizer step, each over its part of the batch
  SequenceTeams context_parallel;           // ranks that share each sequence
  double weight_decay = 0.1;                // of matrices; norms have none
  double beta1 = 0.9, beta2 = 0.99;
  double max_norm = 1.0;      // of the gradient of all parameters; 0: not clipped
  double time_limit = 0.0;    // seconds of training, the schedule is shortened to fit; 0: none
  int64_t eval_interval = 0;  // steps between validations; 0: only after the last
  int64_t num_eval_windows = 256;
  int64_t log_interval = 10;
  uint64_t seed = 42;
  SampleOptions sample;
  std::string save;  // file for the full weights; empty: not saved

  // What is wrong whatever the number of ranks. Errors: c10::ValueError naming the value and what is legal.
  void validate() const;
  // Whether the batch divides over the ranks. Errors: c10::ValueError.
  void validate_for(int64_t world_size) const;

  void validate_context_parallel() const;  // part of validate()
  [[nodiscard]] int64_t rows_per_micro_batch(int64_t world_size) const {
    return batch_size * context_parallel.degree / world_size / gradient_accumulation_steps;
  }
};

// Each block is one group, what remains of the model another; nothing happens when the world is one plain process.
void shard_model(GPT& model, const World& world);

// AdamW with one parameter group that decays (matrices) and one that does not (everything else).
[[nodiscard]] std::unique_ptr<torch::optim::AdamW> make_optimizer(const GPT& model, const TrainOptions& options);

class Trainer {
 public:
  // Collective when the world has several ranks, which all print through their own `out`: only the first one does.
  // Errors, on every rank: c10::ValueError when options do not fit the world or ranks were given different text or
  // options.
  Trainer(TrainOptions options, Corpus corpus, World world, std::ostream& out, bool is_terminal);

  // Trains, saves, prints a sample and, last, the validation loss, which it returns. Collective.
  double run();

 private:
  struct StepResult {
    double loss;
    double grad_norm;
  };
  StepResult train_step(int64_t step);
  [[nodiscard]] at::Tensor loss_of(const Batch& batch, int64_t num_tokens, const at::Tensor& positions);
  void set_learning_rate(double lr);
  [[nodiscard]] StepReport report(int64_t step, int64_t position, const StepResult& result, double step_seconds);
  [[nodiscard]] int64_t schedule_position(int64_t num_steps_done, double elapsed) const;
  double validate();
  void save();
  void print_sample();

  TrainOptions options_;
  Corpus corpus_;
  World world_;
  Progress progress_;
  GPT model_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  BatchSampler sampler_;
  FixedWindows windows_;
  std::chrono::steady_clock::time_point start_;
  double mean_step_seconds_ = 0.0;  // exponential average, not yet corrected for its start at zero
  double step_seconds_weight_ = 0.0;
};

}  // namespace fsdp::train
