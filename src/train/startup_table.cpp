#include "train/startup_table.h"

#include <ATen/Parallel.h>
#include <fsdp/fully_shard.h>

#include <sstream>

namespace fsdp::train {
namespace {

int64_t num_parameters_of(const GPT& model) {
  int64_t result = 0;
  for (const auto& parameter : model->parameters()) {
    result += parameter.numel();  // the global size, sharded or not
  }
  return result;
}

std::string describe_text(const Corpus& corpus) {
  std::ostringstream out;
  out << corpus.num_files() << (corpus.num_files() == 1 ? " file, " : " files, ");
  out << with_commas(corpus.train().numel()) << " bytes to train, " << with_commas(corpus.validation().numel())
      << " to validate";
  if (!corpus.skipped().empty()) {
    out << " (" << corpus.skipped().size() << " empty or binary files left out, first " << corpus.skipped().front()
        << ')';
  }
  return out.str();
}

std::string describe_sharding(const World& world, const GPT& model, int64_t num_parameters) {
  if (world.is_alone()) {
    return "none: one process without a launcher";
  }
  std::ostringstream out;
  out << "fully_shard on " << model->blocks->size()
      << " blocks and the root: " << format_bytes(memory_stats(*model).parameters.current) << " of "
      << format_bytes(num_parameters * static_cast<int64_t>(sizeof(float))) << " of parameters a rank";
  return out.str();
}

std::string describe_optimizer(const TrainOptions& options) {
  const auto& schedule = options.schedule;
  std::ostringstream out;
  out << "AdamW(" << options.beta1 << ", " << options.beta2 << "), weight decay " << options.weight_decay << ", lr "
      << schedule.peak << " after " << schedule.warmup_steps << " of " << schedule.num_steps << " steps, cosine to "
      << schedule.peak * schedule.min_factor;
  if (options.max_norm > 0.0) {
    out << ", gradients clipped at norm " << options.max_norm;
  }
  return out.str();
}

std::string describe_inactive(const TrainOptions& options) {
  std::string result;
  const auto add = [&](bool inactive, const char* name) {
    if (inactive) {
      result += (result.empty() ? "" : ", ") + std::string(name);
    }
  };
  add(options.model.dropout == 0.0, "dropout");
  add(!options.model.activation_checkpoint, "activation checkpointing");
  add(options.context_parallel.degree == 1, "context parallelism");
  add(options.gradient_accumulation_steps == 1, "gradient accumulation");
  add(options.max_norm == 0.0, "clipping");
  add(options.eval_interval == 0, "validation on the way");
  add(options.time_limit == 0.0, "time limit");
  add(options.save.empty(), "saving");
  return result.empty() ? "nothing" : result;
}

}  // namespace

std::string startup_table(const TrainOptions& options, const Corpus& corpus, const World& world, const GPT& model) {
  const auto& sizes = options.model;
  const auto num_parameters = num_parameters_of(model);
  const auto accumulation = options.gradient_accumulation_steps;
  std::ostringstream out;
  out << "text       " << describe_text(corpus) << '\n';
  out << "model      GPT of " << sizes.num_layers << " layers, dim " << sizes.dim << ", " << sizes.num_heads
      << " heads, seq_len " << sizes.seq_len << ", " << sizes.vocab_size
      << " byte tokens: " << with_commas(num_parameters) << " parameters\n";
  out << "world      " << world.size() << (world.size() == 1 ? " rank, " : " ranks, ") << at::get_num_threads()
      << (at::get_num_threads() == 1 ? " thread each\n" : " threads each\n");
  out << "sharding   " << describe_sharding(world, model, num_parameters) << '\n';
  if (options.context_parallel.degree > 1) {
    out << "sequences  each shared by " << options.context_parallel.degree << " ranks ("
        << (options.context_parallel.method == ContextParallelMethod::kRing ? "ring attention" : "Ulysses attention")
        << "): about " << sizes.seq_len / options.context_parallel.degree << " tokens of it a rank\n";
  }
  if (sizes.activation_checkpoint) {
    out << "recompute  each block in backward; only its input is kept (activation checkpointing)\n";
  }
  out << "batch      " << options.batch_size << " sequences a step = " << world.num_data_ranks() << " x "
      << accumulation << " x " << options.rows_per_micro_batch(world.size()) << " ("
      << (options.context_parallel.degree > 1 ? "teams of " : "") << "ranks x micro batches x sequences)\n";
  out << "optimizer  " << describe_optimizer(options) << '\n';
  out << "off        " << describe_inactive(options);
  if (!world.is_alone()) {
    out << "\nblock      each of " << sizes.num_layers << ", as described by fsdp::describe:\n"
        << describe(*model->blocks->ptr(0));
  }
  auto table = out.str();
  table.erase(table.find_last_not_of('\n') + 1);
  return table;
}

}  // namespace fsdp::train
