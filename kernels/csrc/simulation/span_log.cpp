#include "span_log.h"

#include <algorithm>
#include <cstring>

namespace kernels::simulation {

void SpanLog::record(const Task& task, int32_t count, double start_s, double end_s) {
  const auto lane = static_cast<size_t>(task.lane);
  if (lane >= totals_.size()) totals_.resize(lane + 1);
  if (task.kind >= totals_[lane].size()) totals_[lane].resize(task.kind + 1u);
  const bool ended = task.packets_done + count == task.packets && task.pieces_done + 1 == task.pieces;
  totals_[lane][task.kind].add(ended, end_s - start_s, task.work, static_cast<double>(count) / task.packets);
  if (!keeps_rows_) return;
  const size_t place = num_rows_ % kRowsPerChunk;
  if (place == 0) chunks_.emplace_back(new SpanRow[kRowsPerChunk]);
  chunks_.back()[place] = {
      task.number, start_s, end_s, task.work * task.pieces, task.layer, task.micro_batch,
      task.pieces_done * task.packets + task.packets_done, count, task.pieces * task.packets,
      static_cast<uint16_t>(task.lane), task.kind, task.urgent, {},
  };
  ++num_rows_;
}

void SpanLog::copy(size_t first, size_t last, char* to) const {
  while (first < last) {
    const size_t place = first % kRowsPerChunk, count = std::min(last - first, kRowsPerChunk - place);
    std::memcpy(to, &chunks_[first / kRowsPerChunk][place], count * sizeof(SpanRow));
    to += count * sizeof(SpanRow);
    first += count;
  }
}

void SpanLog::clear() {
  num_rows_ = 0;
  chunks_.clear();
  totals_.clear();
}

}  // namespace kernels::simulation
