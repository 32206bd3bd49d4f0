// fsdp train: trains a GPT on text files, over the ranks a launcher started or in one plain process.
#include <ATen/Parallel.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/error_kinds.h"
#include "commands.h"
#include "train/trainer.h"

namespace fsdp::apps {
namespace {

struct TrainArguments {
  std::vector<std::string> data;
  double val_fraction = 0.1;
  int64_t max_bytes = 0;
  int num_threads = 0;
  train::TrainOptions options;
};

void add_data_options(CLI::App& command, TrainArguments& arguments) {
  command.add_option("--data", arguments.data, "text files, or folders of them")->required()->type_name("PATH");
  command.add_option("--val-fraction", arguments.val_fraction, "part of the text, from its end, kept for validation")
      ->capture_default_str();
  command.add_option("--max-bytes", arguments.max_bytes, "read no more text than this; 0: all")->capture_default_str();
}

void add_model_options(CLI::App& command, train::GPTOptions& model) {
  command.add_option("--seq-len", model.seq_len, "bytes in a sequence")->capture_default_str();
  command.add_option("--dim", model.dim, "width, a multiple of --num-heads")->capture_default_str();
  command.add_option("--num-heads", model.num_heads, "attention heads")->capture_default_str();
  command.add_option("--num-layers", model.num_layers, "blocks, each one communication group")->capture_default_str();
  command.add_option("--dropout", model.dropout, "probability")->capture_default_str();
  command.add_flag("--activation-checkpoint", model.activation_checkpoint,
                   "keep only the input of each block and run the block again in backward: less memory, more compute");
}

void add_context_parallel_options(CLI::App& command, train::TrainOptions& options) {
  using Method = ContextParallelMethod;
  command
      .add_option("--context-parallel-degree", options.context_parallel.degree,
                  "ranks that share each sequence; divides the number of ranks")
      ->capture_default_str();
  static const std::map<std::string, Method> methods{{"ulysses", Method::kUlysses}, {"ring", Method::kRing}};
  command
      .add_option("--context-parallel-method", options.context_parallel.method,
                  "how attention sees the tokens of other ranks: ulysses (by heads) or ring")
      ->transform(CLI::CheckedTransformer(methods, CLI::ignore_case))
      ->default_str("ulysses")
      ->type_name("METHOD");
}

void add_training_options(CLI::App& command, train::TrainOptions& options) {
  command.add_option("--steps", options.schedule.num_steps, "optimizer steps")->capture_default_str();
  command.add_option("--batch-size", options.batch_size, "sequences a step, over all ranks")->capture_default_str();
  command
      .add_option("--gradient-accumulation-steps", options.gradient_accumulation_steps,
                  "backwards a step, each over its part of the batch")
      ->capture_default_str();
  command.add_option("--lr", options.schedule.peak, "learning rate after the warm-up")->capture_default_str();
  command.add_option("--warmup-steps", options.schedule.warmup_steps, "steps of rising rate")
      ->default_str("a tenth of --steps, at most 20");
  command.add_option("--min-lr-factor", options.schedule.min_factor, "last rate as a fraction of --lr")
      ->capture_default_str();
  command.add_option("--weight-decay", options.weight_decay, "of matrices")->capture_default_str();
  command.add_option("--max-norm", options.max_norm, "gradient norm to clip at; 0: never")->capture_default_str();
  command.add_option("--seed", options.seed, "of weights, batches and dropout")->capture_default_str();
  command.add_option("--time-limit", options.time_limit, "seconds; the schedule is shortened to fit; 0: none")
      ->capture_default_str();
}

void add_output_options(CLI::App& command, train::TrainOptions& options) {
  command.add_option("--log-interval", options.log_interval, "steps between plain progress lines")
      ->capture_default_str();
  command.add_option("--eval-interval", options.eval_interval, "steps between validations; 0: only at the end")
      ->capture_default_str();
  command.add_option("--eval-windows", options.num_eval_windows, "sequences of a validation")->capture_default_str();
  command.add_option("--sample-bytes", options.sample.num_bytes, "length of the sample at the end; 0: none")
      ->capture_default_str();
  command.add_option("--prompt", options.sample.prompt, "what the sample continues; default: a newline");
  command.add_option("--temperature", options.sample.temperature, "of the sample; 0: always the likeliest byte")
      ->capture_default_str();
  command.add_option("--save", options.save, "write the full weights to this file")->type_name("FILE");
}

int report_failure(const std::exception& error, const std::string& who = "") {
  std::cout << std::flush;
  std::cerr << "fsdp train: error: " << who << comm::reason_of(error) << std::endl;
  return 1;
}

// Everything that can be wrong on one rank alone is found before ranks wait for each other.
int run_train(TrainArguments arguments) {
  auto& options = arguments.options;
  std::unique_ptr<train::Corpus> corpus;
  try {
    TORCH_CHECK_VALUE(arguments.num_threads >= 0, "num_threads must not be negative, but is ", arguments.num_threads);
    options.validate();
    if (const auto size = train::World::announced_size(); size > 0) {
      options.validate_for(size);
    }
    options.sample.seed = options.seed;
    corpus = std::make_unique<train::Corpus>(train::Corpus::load(
        arguments.data,
        {.seq_len = options.model.seq_len, .val_fraction = arguments.val_fraction, .max_bytes = arguments.max_bytes}));
  } catch (const std::exception& error) {
    return report_failure(error);  // every rank says it: the launcher stops the others as soon as one exits
  }
  if (arguments.num_threads > 0) {
    at::set_num_threads(arguments.num_threads);
  }
  std::string who;
  try {
    const auto world = train::World::from_environment(options.context_parallel);
    who = world.is_alone() ? "" : "rank " + std::to_string(world.rank()) + ": ";
    train::Trainer trainer(options, std::move(*corpus), world, std::cout, isatty(STDOUT_FILENO) == 1);
    trainer.run();
    if (!world.is_alone()) {
      destroy_process_group();
    }
  } catch (const std::exception& error) {
    return report_failure(error, who);
  }
  return 0;
}

}  // namespace

void add_train_command(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("train", "Train a GPT on text files, sharded over the ranks of a launcher");
  auto arguments = std::make_shared<TrainArguments>();
  add_data_options(*command, *arguments);
  add_model_options(*command, arguments->options.model);
  add_context_parallel_options(*command, arguments->options);
  add_training_options(*command, arguments->options);
  command->add_option("--num-threads", arguments->num_threads, "threads a rank computes with; 0: LibTorch's choice")
      ->capture_default_str();
  add_output_options(*command, arguments->options);
  command->callback([arguments, command, &exit_code] {
    auto& schedule = arguments->options.schedule;
    if (command->count("--context-parallel-method") > 0 && arguments->options.context_parallel.degree == 1) {
      std::cerr << "fsdp train: error: --context-parallel-method has no effect without --context-parallel-degree above "
                   "1\n";
      exit_code = 1;
      return;
    }
    if (command->count("--warmup-steps") == 0) {
      schedule.warmup_steps = std::min<int64_t>(20, schedule.num_steps / 10);
    }
    exit_code = run_train(*arguments);
  });
}

}  // namespace fsdp::apps
