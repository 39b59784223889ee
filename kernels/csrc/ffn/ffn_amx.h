// The first half of the expert FFN with tiles: see product.h.
#pragma once

#include "../linear/linear_amx.h"
#include "activation.h"

namespace kernels::KERNELS_ISA_NS {
namespace {

constexpr int kPanelUnits = kPanelRows / 2;  // of h: a tile of B has 32 of them

// Two tiles of gate rows, then the same two of up.
Panel gate_up_panel(const FfnRequest& r, int64_t first, int64_t last) {
  Panel panel;
  for (int half = 0; half < 2; ++half) {
    panel.tiles[half] = WeightTile(static_cast<const bf16*>(r.gate), r.gate_stride, first + half * kTileSide, last);
    panel.tiles[2 + half] = WeightTile(static_cast<const bf16*>(r.up), r.up_stride, first + half * kTileSide, last);
  }
  return panel;
}

// h of one unit for a group of tokens; zeros beyond the last unit.
Vec hidden_unit(const FfnRequest& r, const PanelSums& sums, int64_t group, int64_t first, int unit) {
  const int64_t index = first + unit;
  if (index >= r.expert_dim) return zero();
  const int half = unit / kTileSide, row = unit % kTileSide * kTileSide;
  const Vec gate = load(sums.tile(half, group) + row), up = load(sums.tile(2 + half, group) + row);
  return activate(r, r.gate_bias ? add(gate, broadcast(r.gate_bias[index])) : gate,
                  r.up_bias ? add(up, broadcast(r.up_bias[index])) : up);
}

// A panel's sums become the tile of h that holds its units. Sums lie as tiles of B do: units by tokens.
void activate_panel(const FfnRequest& r, const PanelSums& sums, int64_t first, const TokenTiles& h) {
  for (int64_t group = 0; group < h.num_groups; ++group)
    for (int unit = 0; unit < kPanelUnits; unit += 2) {
      __m512i even[kMaxTerms], odd[kMaxTerms];
      split(hidden_unit(r, sums, group, first, unit), even);
      split(hidden_unit(r, sums, group, first, unit + 1), odd);
      for (int term = 0; term < kMaxTerms; ++term)
        _mm512_store_si512(h.tile(first, term, group) + unit / 2 * kTileLine, pairs(even[term], odd[term]));
    }
}

void gate_up(const FfnRequest& r, const float* x, Range range, const NextWeights& next, float* h) {
  const TokenTiles tokens = packed_tokens(x, r.x_dtype, r.num_tokens, r.hidden);
  const TokenTiles hidden = packed_tokens(h, DType::kFp32, r.num_tokens, r.expert_dim);
  Panel panels[kMaxPanels];
  int num_panels = 0;
  for (int64_t first = range.first; first < range.last; first += kPanelUnits)
    panels[num_panels++] = gate_up_panel(r, first, range.last);
  multiply_panels(tokens, panels, num_panels, next, [&](int index, const PanelSums& sums) {
    activate_panel(r, sums, range.first + index * kPanelUnits, hidden);
  });
}

}  // namespace
}  // namespace kernels::KERNELS_ISA_NS
