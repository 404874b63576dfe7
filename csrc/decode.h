// The commonest step: one more token for each of some rows. What Python would lay out as arrays of one
// entry per row is laid out here; toque.kernels.api.Decode is the readable twin.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "bind_program.h"

namespace toque {

class Decode {
 public:
  // `page_table` is all rows' own, [rows of the worker, most pages]. Throws for indices that lie
  // outside of it; what else there is to check, Recording::checked() does.
  Decode(std::vector<int32_t> ids, std::vector<int32_t> rows, std::vector<int32_t> positions,
         const IntTable& page_table, long block_size)
      : ids_(std::move(ids)), rows_(std::move(rows)), positions_(std::move(positions)) {
    const long width = size_of(page_table, 1);
    require(rows_.size() == positions_.size() && !rows_.empty(), "rows and positions differ");
    for (size_t i = 0; i < rows_.size(); ++i) {
      const long position = positions_[i];
      require_index(rows_[i], size_of(page_table, 0), "row");
      require_index(position, width * block_size, "position");
      const int64_t page = page_table.data()[rows_[i] * width + position / block_size];
      write_at_.push_back(page * block_size + position % block_size);
      context_lens_.push_back(position + 1);
    }
    counting_.resize(rows_.size() + 1);
    std::iota(counting_.begin(), counting_.end(), 0);
    batch_ = {positions_, counting_, context_lens_, page_table.data(), size_of(page_table, 0),
              width,      rows_};
  }
  Decode(const Decode&) = delete;
  Decode& operator=(const Decode&) = delete;

  Step checked(const Recording& recording, const OutRows& result) const {
    const Indices output_rows(counting_.data(), rows_.size());
    return recording.checked(batch_, ids_, write_at_, output_rows, result);
  }
  // At which each row's next token will stand.
  std::vector<int64_t> next() const { return {context_lens_.begin(), context_lens_.end()}; }

 private:
  std::vector<int32_t> ids_, rows_, positions_, context_lens_, counting_;
  std::vector<int64_t> write_at_;
  Batch batch_;
};

}  // namespace toque
