#pragma once
// What a model has learnt: its loss on held-out text, and text of its own.
#include <string>

#include "train/batches.h"
#include "train/gpt.h"
#include "train/world.h"

namespace fsdp::train {

// Mean negative log-likelihood in nats a byte over all windows, equal on all ranks and (up to rounding) at every world
// size. rows_per_rank windows go through each forward. Collective.
[[nodiscard]] double validation_loss(GPT& model, const FixedWindows& windows, const World& world,
                                     int64_t rows_per_rank);

struct SampleOptions {
  std::string prompt = "\n";
  int64_t num_bytes = 200;
  double temperature = 0.8;  // 0: always the likeliest byte
  uint64_t seed = 42;

  // Errors: c10::ValueError naming the value that is impossible.
  void validate() const;
};

// num_bytes of continuation, the prompt left out. Collective: every rank runs the same forwards and draws the same
// bytes.
[[nodiscard]] std::string sample_text(GPT& model, const SampleOptions& options);

// Safe to print: newlines, tabs and well-formed UTF-8 stay, any other byte becomes \xNN.
[[nodiscard]] std::string printable(const std::string& bytes);

}  // namespace fsdp::train
