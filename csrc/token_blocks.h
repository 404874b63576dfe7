// Cuts a batch into attention's units of work, and checks every index that attention will follow.
#pragma once

#include <algorithm>
#include <vector>

#include "check.h"

namespace toque {

// The part of a ForwardBatch (src/toque/kernels/api.py) that attention reads.
struct Batch {
  const Ints& positions;       // [tokens]
  const Ints& chunk_starts;    // [chunks + 1]
  const Ints& context_lens;    // [chunks]
  const IntTable& page_table;  // [chunks, most pages of any chunk]
};

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

inline void check_shapes(const Batch& batch, long tokens) {
  const long chunks = size_of(batch.context_lens, 0);
  require(size_of(batch.positions, 0) == tokens, "one position per token");
  require(size_of(batch.chunk_starts, 0) == chunks + 1, "chunk_starts needs chunks + 1 entries");
  require(size_of(batch.page_table, 0) == chunks, "one row of the page table per chunk");
  require(batch.chunk_starts.data()[0] == 0 && batch.chunk_starts.data()[chunks] == tokens,
          "chunk_starts must go from 0 to the number of tokens");
}

inline ChunkRange checked_chunk(const Batch& batch, long chunk, long tokens) {
  const long start = batch.chunk_starts.data()[chunk], end = batch.chunk_starts.data()[chunk + 1];
  require(start >= 0 && start <= end && end <= tokens, "chunk_starts must not decrease");
  const long first = batch.context_lens.data()[chunk] - (end - start);
  require(first >= 0, "a chunk has more tokens than its context");
  for (long t = start; t < end; ++t) {
    require(batch.positions.data()[t] == first + t - start,
            "positions must be consecutive and end at context_lens - 1");
  }
  return {start, end, first};
}

// The chunk's row of the page table; unused places of it may hold anything.
inline const int32_t* checked_pages_of(const Batch& batch, long chunk, const PageLimits& limits) {
  const long width = size_of(batch.page_table, 1);
  const int32_t* row = batch.page_table.data() + chunk * width;
  const long context = batch.context_lens.data()[chunk];
  const long used = (context + limits.block_size - 1) / limits.block_size;
  require(used <= width, "the page table has fewer pages than a context needs");
  for (long i = 0; i < used; ++i) require_index(row[i], limits.pages, "page");
  return row;
}

// The last tokens of a chunk come first: they see the most keys, and the longest unit of work
// should not be the last to start. Throws what require() and require_index() do.
inline std::vector<TokenBlock> token_blocks(const Batch& batch, long tokens,
                                            const PageLimits& limits, long block_tokens) {
  check_shapes(batch, tokens);
  std::vector<TokenBlock> blocks;
  for (long chunk = 0; chunk < size_of(batch.context_lens, 0); ++chunk) {
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
