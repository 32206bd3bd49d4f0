#include "train/outcome.h"

#include <c10/util/Exception.h>

namespace fsdp::train {
namespace {

std::string text_of(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  const std::string text = known ? known->what_without_backtrace() : error.what();
  return text.empty() ? "an exception without a message" : text;
}

}  // namespace

void Outcome::run(const std::function<void()>& body) {
  if (thrown_) return;
  try {
    body();
  } catch (const std::exception& error) {
    thrown_ = std::current_exception();
    complaint_ = text_of(error);
  } catch (...) {
    thrown_ = std::current_exception();
    complaint_ = "an exception that is no std::exception";
  }
}

void Outcome::rethrow() const {
  if (thrown_) std::rethrow_exception(thrown_);
}

}  // namespace fsdp::train
