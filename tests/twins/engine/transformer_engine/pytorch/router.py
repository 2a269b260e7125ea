"""Routing of experts, which the stand-in does not have."""

fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function = None
