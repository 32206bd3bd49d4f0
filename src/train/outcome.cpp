#include "train/outcome.h"

#include "comm/error_kinds.h"

namespace fsdp::train {

void Outcome::run(const std::function<void()>& body) {
  if (thrown_) return;
  try {
    body();
  } catch (const std::exception& error) {
    thrown_ = std::current_exception();
    complaint_ = comm::reason_of(error);
    if (complaint_.empty()) complaint_ = "an exception without a message";
  } catch (...) {
    thrown_ = std::current_exception();
    complaint_ = "an exception that is no std::exception";
  }
}

void Outcome::rethrow() const {
  if (thrown_) std::rethrow_exception(thrown_);
}

}  // namespace fsdp::train
