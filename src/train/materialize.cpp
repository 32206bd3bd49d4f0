// Memory for what is on the meta device, then values, then the proof that nothing is left without them.
#include <fsdp/materialize.h>
#include <torch/csrc/autograd/variable.h>

#include <limits>
#include <set>

#include "mesh/agreement.h"
#include "mesh/reduce_numbers.h"
#include "sharding/module_tree.h"
#include "train/module_entries.h"
#include "train/move_values.h"
#include "train/outcome.h"

namespace fsdp {

namespace {

using train::ModuleEntry;

// A tensor that came from the meta device, as it was before init ran.
struct BlankTensor {
  ModuleEntry entry;
  uint32_t version;
};

// Marks memory as not yet written where the dtype has a mark for it.
void fill_blank(const at::Tensor& memory) {
  if (memory.is_floating_point() || memory.is_complex()) {
    memory.fill_(std::numeric_limits<double>::quiet_NaN());
  } else {
    memory.zero_();
  }
}

// Whether memory holds values everywhere. `was_written` decides for dtypes without a NaN.
bool has_values(const at::Tensor& memory, bool was_written) {
  if (memory.is_meta()) return false;
  if (!memory.is_floating_point() && !memory.is_complex()) return was_written;
  const bool is_narrow = memory.element_size() == 1;  // the float8 types have few kernels
  return !at::isnan(is_narrow ? memory.to(at::kFloat) : memory).any().item<bool>();
}

// The same handle, now over memory on `device`.
void give_memory(const at::Tensor& tensor, c10::Device device) {
  const dtensor::PlainScope plain;
  if (auto* state = dtensor::state_of(tensor)) {
    if (state->local().is_meta())
      state->set_local(at::empty_like(state->local(), state->local().options().device(device)));
    fill_blank(state->local());
    dtensor::refresh_handle(tensor, tensor);
  } else {
    const auto memory = at::empty(tensor.sizes(), tensor.options().device(device).requires_grad(false));
    fill_blank(memory);
    tensor.unsafeGetTensorImpl()->shallow_copy_from(memory.getIntrusivePtr());
  }
  // An accumulator made before still speaks of the meta device.
  using torch::autograd::Node;
  const c10::weak_intrusive_ptr<Node> none{c10::intrusive_ptr<Node>()};
  if (tensor.requires_grad()) torch::autograd::impl::set_grad_accumulator(tensor, none);
}

// What is on the meta device, each tensor once under its first name.
std::vector<ModuleEntry> entries_on_meta(const std::vector<ModuleEntry>& entries) {
  std::vector<ModuleEntry> found;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& entry : entries)
    if (entry.tensor.is_meta() && seen.insert(entry.tensor.unsafeGetTensorImpl()).second) found.push_back(entry);
  return found;
}

std::vector<std::shared_ptr<sharding::ParamGroup>> groups_of(const std::vector<ModuleEntry>& entries) {
  std::vector<std::shared_ptr<sharding::ParamGroup>> groups;
  for (const auto& entry : entries) {
    auto group = sharding::group_of(entry.tensor);
    if (group && std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(std::move(group));
  }
  return groups;
}

void check_groups_are_inside(const std::vector<ModuleEntry>& blanks, const std::string& title) {
  size_t num_inside = 0;
  size_t num_in_groups = 0;
  std::string name;
  for (const auto& entry : blanks) num_inside += sharding::group_of(entry.tensor) ? 1 : 0;
  for (const auto& group : groups_of(blanks)) {
    num_in_groups += group->paths_on_meta().size();
    name = group->name();
  }
  TORCH_CHECK_VALUE(num_inside == num_in_groups, title, ": the group of ", name,
                    " has parameters outside of this module: materialize the module that fully_shard wrapped");
}

std::vector<BlankTensor> make_blank(const std::vector<ModuleEntry>& blanks, c10::Device device) {
  for (const auto& group : groups_of(blanks)) group->rebuild_on(device);
  std::vector<BlankTensor> made;
  for (const auto& entry : blanks) {
    give_memory(entry.tensor, device);
    made.push_back({entry, static_cast<uint32_t>(entry.tensor._version())});
  }
  return made;
}

// What init left blank on this rank.
std::vector<ModuleEntry> still_blank(const std::vector<BlankTensor>& made, const torch::nn::Module& module) {
  std::unordered_map<std::string, at::Tensor> now;  // init may have registered other tensors
  for (const auto& entry : train::entries_of(module)) now.emplace(entry.name, entry.tensor);
  const dtensor::PlainScope plain;
  std::vector<ModuleEntry> blank;
  for (const auto& [entry, version] : made) {
    const auto found = now.find(entry.name);
    if (found == now.end()) continue;
    const auto& tensor = found->second;
    auto* state = dtensor::state_of(tensor);
    const bool was_written = !tensor.is_same(entry.tensor) || tensor._version() != version;
    if (!has_values(state ? state->local() : tensor, was_written))
      blank.push_back({entry.name, tensor, entry.is_buffer});
  }
  return blank;
}

// Buffers that are blank on some rank of `mesh` get its first rank's values. `blank`: what is blank on this one.
void share_buffers(const std::vector<BlankTensor>& made, const torch::nn::Module& module,
                   const std::vector<ModuleEntry>& blank, const DeviceMesh& mesh) {
  std::vector<ModuleEntry> buffers;
  for (const auto& entry : train::entries_of(module)) {
    const bool was_blank =
        std::any_of(made.begin(), made.end(), [&](const auto& m) { return m.entry.name == entry.name; });
    if (entry.is_buffer && was_blank) buffers.push_back(entry);
  }
  if (buffers.empty()) return;
  std::vector<double> flags;
  for (const auto& buffer : buffers) {
    const bool is_blank =
        std::any_of(blank.begin(), blank.end(), [&](const auto& entry) { return entry.name == buffer.name; });
    flags.push_back(is_blank ? 1 : 0);
  }
  flags = reduce_numbers(flags, mesh, "agree on buffers without values (materialize)", c10d::ReduceOp::MAX);
  const bool is_first = is_first_rank(mesh);
  for (size_t i = 0; i < buffers.size(); ++i)
    if (flags[i] != 0)
      train::send_value(buffers[i].tensor, is_first ? buffers[i].tensor : at::Tensor(), mesh, buffers[i].name);
}

// The mesh of the most ranks: buffers are the same on all of them. Undefined for a plain module.
DeviceMesh widest_of(const std::vector<DeviceMesh>& meshes) {
  DeviceMesh widest;
  for (const auto& mesh : meshes)
    if (!widest.defined() || mesh.size() > widest.size()) widest = mesh;
  return widest;
}

struct Materialization {
  std::string title;
  std::vector<DeviceMesh> meshes;
  std::vector<BlankTensor> made;
};

// Runs init and makes sure on all ranks that nothing stays blank.
void give_values(torch::nn::Module& module, const Materialization& work,
                 const std::function<void(torch::nn::Module&)>& init) {
  train::Outcome outcome;
  outcome.run([&] { init(module); });
  auto complaint = train::any_complaint(work.meshes, "init of " + work.title, outcome.complaint());
  outcome.rethrow();
  TORCH_CHECK(complaint.empty(), work.title, ": init failed: ", complaint);

  const auto blank = still_blank(work.made, module);
  const auto mesh = widest_of(work.meshes);
  const bool gives_buffers = !mesh.defined() || is_first_rank(mesh);
  std::vector<std::string> names;
  for (const auto& entry : blank)
    if (!entry.is_buffer || gives_buffers) names.push_back(entry.name);
  complaint = names.empty() ? "" : "init left without values, in whole or in part: " + train::listed(names);
  complaint = train::any_complaint(work.meshes, "values of " + work.title, complaint);
  TORCH_CHECK_VALUE(complaint.empty(), work.title, ": ", complaint);
  if (mesh.defined()) share_buffers(work.made, module, blank, mesh);
}

}  // namespace

void materialize(torch::nn::Module& module, c10::Device device, const std::function<void(torch::nn::Module&)>& init) {
  const auto title = "materialize(" + sharding::type_name(module) + ")";
  const auto entries = train::entries_of(module);
  const auto meshes = train::meshes_of(entries);
  TORCH_CHECK_VALUE(!device.is_meta(), title, ": the meta device has no memory to give");
  for (const auto& mesh : meshes)
    TORCH_CHECK_VALUE(mesh.device_type() == device.type(), title, ": the mesh is on ", mesh.device_type(), ", not on ",
                      device);
  const auto blanks = entries_on_meta(entries);
  check_groups_are_inside(blanks, title);
  const Materialization work{title, meshes, make_blank(blanks, device)};
  try {
    give_values(module, work, init);
  } catch (...) {
    std::ignore = make_blank(blanks, c10::kMeta);  // so that another try is as strict
    throw;
  }
}

}  // namespace fsdp
