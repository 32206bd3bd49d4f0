#pragma once
// What an exception says, and whether the caller is at fault for it or the world is (docs/errors.md).
//
//   catch (const std::exception& error) {
//     if (comm::is_misuse(error)) throw;
//     C10_THROW_ERROR(DistError, "cannot connect: " + comm::reason_of(error));
//   }
#include <exception>
#include <string>

namespace fsdp::comm {

// Its text, without the C++ backtrace that LibTorch appends.
[[nodiscard]] std::string reason_of(const std::exception& error);

// Whether its type tells of wrong arguments. A plain c10::Error may be either: backends raise it for lost peers too.
[[nodiscard]] bool is_misuse(const std::exception& error);

}  // namespace fsdp::comm
