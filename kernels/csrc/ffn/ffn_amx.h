// The first half of the expert FFN with tiles: see product.h.
#pragma once

#include "../linear/linear_amx.h"
#include "activation.h"

namespace kernels::KERNELS_ISA_NS {
namespace {

constexpr int kPanelUnits = kPanelRows / 2;  // of h: a tile of B has twice as many

// A tile of gate rows, then the same one of up.
Panel gate_up_panel(const FfnRequest& r, int64_t first, int64_t last) {
  return {{WeightTile(static_cast<const bf16*>(r.gate), r.gate_stride, first, last),
           WeightTile(static_cast<const bf16*>(r.up), r.up_stride, first, last)}};
}

// h of one unit for a group of tokens; zeros beyond the last unit.
Vec hidden_unit(const FfnRequest& r, const PanelSums& sums, int64_t group, int64_t first, int unit) {
  const int64_t index = first + unit;
  if (index >= r.expert_dim) return zero();
  const Vec gate = load(sums.tile(0, group) + unit * kTileSide), up = load(sums.tile(1, group) + unit * kTileSide);
  return activate(r, r.gate_bias ? add(gate, broadcast(r.gate_bias[index])) : gate,
                  r.up_bias ? add(up, broadcast(r.up_bias[index])) : up);
}

// A panel's sums become half of the tile of h that holds its units. Sums lie as tiles of B do: units by tokens.
void activate_panel(const FfnRequest& r, const PanelSums& sums, int64_t first, const TokenTiles& h) {
  const int64_t in_tile = first % kTileDepth;
  for (int64_t group = 0; group < h.num_groups; ++group)
    for (int unit = 0; unit < kPanelUnits; unit += 2) {
      __m512i even[kMaxTerms], odd[kMaxTerms];
      split(hidden_unit(r, sums, group, first, unit), even);
      split(hidden_unit(r, sums, group, first, unit + 1), odd);
      for (int term = 0; term < kMaxTerms; ++term) {
        const int column = h.first_column(term), part = column / kTileSide, in_part = column % kTileSide;
        char* const row = h.tile(first - in_tile, part, group) + (in_tile + unit) / 2 * kTileLine;
        const auto lanes = __mmask16(((1u << h.term_columns) - 1) << in_part);
        const auto to_the_end = __mmask16(0xffffu << in_part);  // zeros, or the next term's place
        _mm512_mask_storeu_epi32(row, to_the_end, _mm512_maskz_expand_epi32(lanes, pairs(even[term], odd[term])));
      }
    }
}

void gate_up(const FfnRequest& r, const float* x, Range range, const NextWeights& next, float* h) {
  const TokenTiles tokens = packed_tokens(x, r.x_dtype, r.num_tokens, r.hidden);
  const TokenTiles hidden = packed_tokens(h, DType::kFp32, r.num_tokens, r.expert_dim);
  Panel panels[kMaxPanels];
  int num_panels = 0;
  const int64_t end = (range.last + kTileDepth - 1) / kTileDepth * kTileDepth;  // whole tiles of h
  for (int64_t first = range.first; first < end; first += kPanelUnits)
    panels[num_panels++] = gate_up_panel(r, first, range.last);
  multiply_panels(tokens, panels, num_panels, next, [&](int index, const PanelSums& sums) {
    activate_panel(r, sums, range.first + index * kPanelUnits, hidden);
  });
}

}  // namespace
}  // namespace kernels::KERNELS_ISA_NS
