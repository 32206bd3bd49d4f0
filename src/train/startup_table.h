#pragma once
// The table that fsdp train prints before the first step.
#include <string>

#include "train/trainer.h"

namespace fsdp::train {

// What is about to run: text, model, world, sharding, batch, optimizer and what is switched off. Never communicates.
[[nodiscard]] std::string startup_table(const TrainOptions& options, const Corpus& corpus, const World& world,
                                        const GPT& model);

}  // namespace fsdp::train
