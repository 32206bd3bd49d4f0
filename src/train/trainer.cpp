#include "train/trainer.h"

#include <fsdp/fully_shard.h>
#include <fsdp/state_dict.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/utils/clip_grad.h>

#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>
#include <tuple>

#include "train/startup_table.h"

namespace fsdp::train {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The same initial weights on every rank and at every world size.
GPT make_model(const GPTOptions& options, uint64_t seed) {
  torch::manual_seed(seed);
  return GPT(options);
}

// On one line, for a heading.
std::string one_line(const std::string& text) {
  std::string result = printable(text);
  for (size_t at = 0; (at = result.find('\n', at)) != std::string::npos; at += 2) {
    result.replace(at, 1, "\\n");
  }
  return '"' + result + '"';
}

std::string format_validation(double loss) {
  std::ostringstream out;
  out << "validation loss: " << std::fixed << std::setprecision(4) << loss << " nats/byte";
  return out.str();
}

// A line for each thing that all ranks must have been given alike. Which file the first rank writes is its own matter.
std::string settings_of(const TrainOptions& options, const Corpus& corpus) {
  const auto& [model, schedule, sample] = std::tie(options.model, options.schedule, options.sample);
  std::ostringstream text;
  text << std::setprecision(std::numeric_limits<double>::digits10);
  text << "text of " << corpus.train().numel() << " + " << corpus.validation().numel() << " bytes, checksum "
       << corpus.checksum() << '\n';
  text << "model: vocab_size " << model.vocab_size << ", seq_len " << model.seq_len << ", dim " << model.dim
       << ", num_heads " << model.num_heads << ", num_layers " << model.num_layers << ", dropout " << model.dropout
       << ", activation_checkpoint " << model.activation_checkpoint << '\n';
  text << "lr " << schedule.peak << ", min_lr_factor " << schedule.min_factor << ", warmup_steps "
       << schedule.warmup_steps << ", steps " << schedule.num_steps << ", time_limit " << options.time_limit << '\n';
  text << "batch_size " << options.batch_size << ", gradient_accumulation_steps " << options.gradient_accumulation_steps
       << ", seed " << options.seed << '\n';
  text << "context_parallel_degree " << options.context_parallel.degree << ", by ring "
       << (options.context_parallel.method == ContextParallelMethod::kRing) << '\n';
  text << "weight_decay " << options.weight_decay << ", betas " << options.beta1 << " " << options.beta2
       << ", max_norm " << options.max_norm << '\n';
  text << "eval_interval " << options.eval_interval << ", eval_windows " << options.num_eval_windows << ", saved "
       << !options.save.empty() << '\n';
  text << "sample of " << sample.num_bytes << " bytes, temperature " << sample.temperature << ", seed " << sample.seed
       << ", prompt " << one_line(sample.prompt) << '\n';
  return text.str();
}

}  // namespace

void shard_model(GPT& model, const World& world) {
  if (world.is_alone()) {
    return;
  }
  for (const auto& block : *model->blocks) {
    fully_shard(block, {.mesh = world.mesh()});
  }
  fully_shard(model, {.mesh = world.mesh()});
}

std::unique_ptr<torch::optim::AdamW> make_optimizer(const GPT& model, const TrainOptions& options) {
  std::vector<at::Tensor> matrices, others;
  for (const auto& parameter : model->parameters()) {
    (parameter.dim() >= 2 ? matrices : others).push_back(parameter);
  }
  const auto defaults =
      torch::optim::AdamWOptions(options.schedule.peak).betas({options.beta1, options.beta2}).weight_decay(0.0);
  auto decayed = std::make_unique<torch::optim::AdamWOptions>(defaults);
  decayed->weight_decay(options.weight_decay);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(matrices), std::move(decayed));
  groups.emplace_back(std::move(others));
  return std::make_unique<torch::optim::AdamW>(std::move(groups), defaults);
}

Trainer::Trainer(TrainOptions options, Corpus corpus, World world, std::ostream& out, bool is_terminal)
    : options_(std::move(options)),
      corpus_(std::move(corpus)),
      world_(std::move(world)),
      progress_(out, is_terminal, !world_.is_first(), options_.log_interval),
      model_(make_model(options_.model, options_.seed)),
      sampler_(corpus_.train(), options_.model.seq_len, options_.seed),
      windows_(corpus_.validation(), options_.model.seq_len, options_.num_eval_windows) {
  const auto difference = world_.any_difference(settings_of(options_, corpus_));
  TORCH_CHECK_VALUE(difference.empty(), "the ranks were given different text or options: ", difference,
                    ". Hint: every node needs the same files at the same paths, and the same options.");
  options_.validate_for(world_.size());
  shard_model(model_, world_);
  optimizer_ = make_optimizer(model_, options_);
  progress_.line(startup_table(options_, corpus_, world_, model_));
  torch::manual_seed(options_.seed + 1 + static_cast<uint64_t>(world_.rank()));  // dropout differs between ranks
}

// The part of the mean loss of a micro batch of `num_tokens` that this rank's tokens make up, times the ranks that
// share it: its mean over them is that mean loss.
at::Tensor Trainer::loss_of(const Batch& batch, int64_t num_tokens, const at::Tensor& positions) {
  namespace F = torch::nn::functional;
  const auto logits = model_(batch.inputs, positions);  // [B, T, V]
  const auto sum = F::cross_entropy(logits.flatten(0, 1), batch.targets.flatten(),
                                    F::CrossEntropyFuncOptions().reduction(torch::kSum));
  return sum * (static_cast<double>(world_.context_parallel_degree()) / static_cast<double>(num_tokens));
}

Trainer::StepResult Trainer::train_step(int64_t step) {
  const auto num_micro_batches = options_.gradient_accumulation_steps;
  const auto num_rows = options_.rows_per_micro_batch(world_.size());
  double loss_sum = 0.0;
  for (int64_t i = 0; i < num_micro_batches; ++i) {
    const auto first_row = (world_.data_rank() * num_micro_batches + i) * num_rows;
    const auto batch = sampler_.rows(step, first_row, num_rows);
    const auto num_tokens = batch.targets.numel();
    const auto scope = world_.split_sequences(*model_, batch);
    const auto loss = loss_of(batch, num_tokens, scope ? scope->position_ids() : at::Tensor());
    (loss / num_micro_batches).backward();
    loss_sum += loss.item<double>();
  }
  const double max_norm = options_.max_norm > 0.0 ? options_.max_norm : std::numeric_limits<double>::infinity();
  const double grad_norm = torch::nn::utils::clip_grad_norm_(model_->parameters(), max_norm);
  optimizer_->step();
  optimizer_->zero_grad();
  return {loss_sum / static_cast<double>(num_micro_batches), grad_norm};
}

void Trainer::set_learning_rate(double lr) {
  for (auto& group : optimizer_->param_groups()) {
    group.options().set_lr(lr);
  }
}

// How far the schedule is: the steps done, or more when the time limit would cut it short.
int64_t Trainer::schedule_position(int64_t num_steps_done, double elapsed) const {
  if (options_.time_limit == 0.0) {
    return num_steps_done;
  }
  const double fraction = std::min(1.0, elapsed / options_.time_limit);  // infinite for a tiny limit
  const double by_time = static_cast<double>(options_.schedule.num_steps) * fraction;
  return std::max(num_steps_done, static_cast<int64_t>(by_time));
}

StepReport Trainer::report(int64_t step, int64_t position, const StepResult& result, double step_seconds) {
  static constexpr double kDecay = 0.95;
  mean_step_seconds_ = kDecay * mean_step_seconds_ + (1.0 - kDecay) * step_seconds;
  step_seconds_weight_ = kDecay * step_seconds_weight_ + (1.0 - kDecay);
  const double seconds = mean_step_seconds_ / step_seconds_weight_;
  const auto num_steps = options_.schedule.num_steps;

  StepReport line{.step = step + 1, .num_steps = num_steps, .loss = result.loss, .grad_norm = result.grad_norm};
  line.is_last = position >= num_steps;
  line.tokens_per_second = static_cast<double>(options_.batch_size * options_.model.seq_len) / seconds;
  line.resident_bytes = resident_bytes();
  line.seconds_left = seconds * static_cast<double>(num_steps - step - 1);
  if (options_.time_limit > 0.0) {
    line.seconds_left = std::min(line.seconds_left, options_.time_limit - seconds_since(start_));
  }
  if (!world_.is_alone()) {
    const auto stats = memory_stats(*model_);
    line.sharded_bytes = stats.parameters.current + stats.gradients.current + stats.other.current +
                         stats.gathered.current + stats.buffers.current;
  }
  return line;
}

double Trainer::validate() {
  return validation_loss(model_, windows_, world_, std::max<int64_t>(options_.batch_size / world_.num_data_ranks(), 1));
}

void Trainer::save() {
  save_full_state_dict(*model_, options_.save);
  progress_.line("saved the full weights to " + options_.save);
}

void Trainer::print_sample() {
  const auto text = sample_text(model_, options_.sample);
  progress_.line("sample, " + std::to_string(options_.sample.num_bytes) + " bytes after " +
                 one_line(options_.sample.prompt) + ":\n" + printable(text));
}

double Trainer::run() {
  start_ = std::chrono::steady_clock::now();
  const auto num_steps = options_.schedule.num_steps;
  int64_t step = 0;
  for (int64_t position = 0; position < num_steps; ++step) {
    const auto step_start = std::chrono::steady_clock::now();
    const double lr = learning_rate(options_.schedule, position);
    set_learning_rate(lr);
    auto result = train_step(step);
    // One small reduction a step: all ranks see the same loss and the same clock, so that they stop together.
    const auto agreed = world_.mean({result.loss, seconds_since(start_)});
    result.loss = agreed[0];
    TORCH_CHECK(std::isfinite(result.loss), "the loss of step ", step + 1, " is ", result.loss,
                ". Hint: a lower --lr or more --warmup-steps.");
    position = schedule_position(step + 1, agreed[1]);
    auto line = report(step, position, result, seconds_since(step_start));
    line.lr = lr;
    progress_.step(line);
    if (options_.eval_interval > 0 && (step + 1) % options_.eval_interval == 0 && position < num_steps) {
      progress_.line("step: " + std::to_string(step + 1) + "  " + format_validation(validate()));
    }
  }
  progress_.finish();
  if (step < num_steps) {
    progress_.line("the time limit shortened the run to " + std::to_string(step) + " steps");
  }
  const double loss = validate();
  if (!options_.save.empty()) {
    save();
  }
  if (options_.sample.num_bytes > 0) {
    print_sample();
  }
  progress_.line(format_validation(loss));
  return loss;
}

}  // namespace fsdp::train
