// Drawn batches over scattered pages, checked as the binding checks them.
#pragma once

#include <algorithm>

#include "drawn.h"

namespace toque {

struct Chunk {
  long context;  // tokens of the sequence, the new ones included
  long tokens;   // new ones, the last of the context
};

// Sequences and their pages: rows of the page table are exactly as long as each needs.
struct Sequences {
  std::vector<Chunk> chunks;
  std::vector<Block<int32_t>> pages;
  long num_pages = 0;
  long block_size;

  Sequences(Draw& draw, long size, std::vector<Chunk> all)
      : chunks(std::move(all)), block_size(size) {
    std::vector<int32_t> free;
    for (const Chunk& c : chunks) num_pages += (c.context + size - 1) / size;
    num_pages += draw.of(0, 3);
    for (long page = 0; page < num_pages; ++page) free.push_back(static_cast<int32_t>(page));
    for (size_t i = free.size(); i > 1; --i) std::swap(free[i - 1], free[draw.of(0, i - 1)]);
    for (const Chunk& c : chunks) {
      Block<int32_t> row((c.context + size - 1) / size);
      for (long i = 0; i < row.size(); ++i, free.pop_back()) row[i] = free.back();
      pages.push_back(std::move(row));
    }
  }

  long place(long chunk, long position) const {
    return pages[chunk][position / block_size] * block_size + position % block_size;
  }
  long tokens() const {
    long sum = 0;
    for (const Chunk& c : chunks) sum += c.tokens;
    return sum;
  }
  // Attention's units, `most` tokens each.
  std::vector<TokenBlock> blocks(long most) const {
    std::vector<TokenBlock> all;
    long row = 0;
    for (size_t i = 0; i < chunks.size(); ++i) {
      const Chunk& c = chunks[i];
      for (long done = 0; done < c.tokens; done += most) {
        all.push_back({pages[i].data(), row + done, std::min(most, c.tokens - done),
                       c.context - c.tokens + done});
      }
      row += c.tokens;
    }
    return all;
  }
};

// Angles of positions 0..count-1.
struct Rope {
  Block<float> cos, sin;
  Rope(long count, long dim) : cos(count * (dim / 2)), sin(count * (dim / 2)) {
    for (long p = 0; p < count; ++p) {
      for (long i = 0; i < dim / 2; ++i) {
        const double angle = p * std::pow(1e4, -2.0 * i / dim);
        cos[p * (dim / 2) + i] = static_cast<float>(std::cos(angle));
        sin[p * (dim / 2) + i] = static_cast<float>(std::sin(angle));
      }
    }
  }
};

}  // namespace toque
