// Cuts a batch into attention's units of work, and checks every index that attention will follow.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "check.h"

namespace toque {

using Indices = std::span<const int32_t>;

// The part of a ForwardBatch (src/toque/kernels/api.py) that attention reads.
struct Batch {
  Indices positions;     // [tokens]
  Indices chunk_starts;  // [chunks + 1]
  Indices context_lens;  // [chunks]
  const int32_t* page_table;  // [table_rows, table_width]
  long table_rows;
  long table_width;
  Indices rows_of;  // [chunks]: which row is a chunk's; empty = row c is chunk c's
};

inline Indices indices(const Ints& array) { return {array.data(), array.size()}; }

inline Batch batch_of(const Ints& positions, const Ints& chunk_starts, const Ints& context_lens,
                      const IntTable& page_table) {
  return {indices(positions), indices(chunk_starts), indices(context_lens), page_table.data(),
          size_of(page_table, 0), size_of(page_table, 1), {}};
}

struct PageLimits {
  long block_size;
  long pages;
};

// One chunk's tokens start..end-1 in the batch, the first of them at position `first`.
struct ChunkRange {
  long start;
  long end;
  long first;
};

inline void check_shapes(const Batch& batch, size_t tokens) {
  const size_t chunks = batch.context_lens.size();
  require(batch.positions.size() == tokens, "one position per token");
  require(batch.chunk_starts.size() == chunks + 1, "chunk_starts needs chunks + 1 entries");
  require(batch.rows_of.empty() ? batch.table_rows == static_cast<long>(chunks)
                                : batch.rows_of.size() == chunks,
          "one row of the page table per chunk");
  for (int32_t row : batch.rows_of) require_index(row, batch.table_rows, "row");
  require(batch.chunk_starts[0] == 0 && batch.chunk_starts[chunks] == static_cast<long>(tokens),
          "chunk_starts must go from 0 to the number of tokens");
}

inline ChunkRange checked_chunk(const Batch& batch, long chunk, long tokens) {
  const long start = batch.chunk_starts[chunk], end = batch.chunk_starts[chunk + 1];
  require(start >= 0 && start <= end && end <= tokens, "chunk_starts must not decrease");
  const long first = batch.context_lens[chunk] - (end - start);
  require(first >= 0, "a chunk has more tokens than its context");
  for (long t = start; t < end; ++t) {
    require(batch.positions[t] == first + t - start,
            "positions must be consecutive and end at context_lens - 1");
  }
  return {start, end, first};
}

// The chunk's row of the page table; unused places of it may hold anything.
inline const int32_t* checked_pages_of(const Batch& batch, long chunk, const PageLimits& limits) {
  const long row = batch.rows_of.empty() ? chunk : batch.rows_of[chunk];
  const int32_t* pages = batch.page_table + row * batch.table_width;
  const long context = batch.context_lens[chunk];
  const long used = (context + limits.block_size - 1) / limits.block_size;
  require(used <= batch.table_width, "the page table has fewer pages than a context needs");
  for (long i = 0; i < used; ++i) require_index(pages[i], limits.pages, "page");
  return pages;
}

// The last tokens of a chunk come first: they see the most keys, and the longest unit of work
// should not be the last to start. Throws what require() and require_index() do.
inline std::vector<TokenBlock> token_blocks(const Batch& batch, long tokens,
                                            const PageLimits& limits, long block_tokens) {
  check_shapes(batch, tokens);
  std::vector<TokenBlock> blocks;
  for (long chunk = 0; chunk < static_cast<long>(batch.context_lens.size()); ++chunk) {
    const ChunkRange range = checked_chunk(batch, chunk, tokens);
    const int32_t* pages = checked_pages_of(batch, chunk, limits);
    const long count = (range.end - range.start + block_tokens - 1) / block_tokens;
    for (long i = count - 1; i >= 0; --i) {
      const long offset = i * block_tokens;
      const long size = std::min(block_tokens, range.end - range.start - offset);
      blocks.push_back({pages, range.start + offset, size, range.first + offset});
    }
  }
  return blocks;
}

}  // namespace toque
