"""Layouts of published training runs, as their reports say them."""

from __future__ import annotations

from typing import NamedTuple

from autopar.exchange.layout import Layout


class Run(NamedTuple):
    """dp, tp, pp, cp, ep: degrees; vpp: chunks per stage (0: not said); zero: stage of ZeRO; batches in sequences."""

    id: str
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    vpp: int
    sequence_parallel: bool
    zero: int
    micro_batch: int
    global_batch: int
    recompute: str
    precision: str
    layers: int


# fmt: off
RUNS = (
    Run("korthikanti_t5_22B_full", 1, 8, 1, 1, 1, 0, False, 0, 4, 4, "full", "fp16", 48),
    Run("korthikanti_t5_22B_selective", 1, 8, 1, 1, 1, 0, True, 0, 4, 4, "selective", "fp16", 48),
    Run("korthikanti_t4_22B_layer_baseline", 1, 8, 1, 1, 1, 0, False, 0, 4, 4, "none", "fp16", 1),
    Run("korthikanti_t4_22B_layer_seqpar", 1, 8, 1, 1, 1, 0, True, 0, 4, 4, "none", "fp16", 1),
    Run("megatron2020_dgx2_1B", 1, 1, 1, 1, 1, 0, False, 0, 8, 8, "full", "fp16", 24),
    Run("megatron2020_dgxa100_1B", 1, 1, 1, 1, 1, 0, False, 0, 16, 16, "full", "fp16", 24),
    Run("megatron_readme_gpt3_1024", 8, 8, 16, 1, 1, 0, False, 0, 1, 1536, "full", "fp16", 96),
    Run("mosaic_13b_s2048_g512_h100_80gb_bf16_mb16", 512, 1, 1, 1, 1, 0, False, 3, 16, 8192, "full", "bf16", 40),
    Run("mosaic_13b_s2048_g256_h100_80gb_bf16_mb16", 256, 1, 1, 1, 1, 0, False, 3, 16, 4096, "full", "bf16", 40),
    Run("mosaic_7b_s2048_g512_h100_80gb_bf16_mb6", 512, 1, 1, 1, 1, 0, False, 3, 6, 3072, "none", "bf16", 32),
    Run("mosaic_7b_s2048_g256_h100_80gb_bf16_mb6", 256, 1, 1, 1, 1, 0, False, 3, 6, 1536, "none", "bf16", 32),
    Run("mosaic_3b_s2048_g512_h100_80gb_bf16_mb8", 512, 1, 1, 1, 1, 0, False, 2, 8, 4096, "none", "bf16", 32),
    Run("mosaic_3b_s2048_g256_h100_80gb_bf16_mb8", 256, 1, 1, 1, 1, 0, False, 2, 8, 2048, "none", "bf16", 32),
    Run("mosaic_760m_s32768_g8_h100_80gb_bf16_mb1", 8, 1, 1, 1, 1, 0, False, 3, 1, 16, "none", "bf16", 24),
    Run("mosaic_70b_s2048_g64_a100_80gb_bf16_mb8", 64, 1, 1, 1, 1, 0, False, 3, 8, 2048, "full", "bf16", 80),
    Run("bloom_187B_h13824_L80_a96_n40_dp4tp8pp10_mbs", 4, 8, 10, 1, 1, 0, False, 1, 1, 2048, "full", "fp16", 80),
    Run("bloom_187B_h13824_L80_a96_n40_dp4tp8pp10_m-1", 4, 8, 10, 1, 1, 0, False, 1, 2, 2048, "full", "fp16", 80),
    Run("bloom_181B_h14336_L72_a64_n48_dp4tp8pp12_mbs", 4, 8, 12, 1, 1, 0, False, 1, 1, 2048, "full", "fp16", 72),
    Run("bloom_184B_h12288_L100_a64_n48_dp16tp4pp6_mb", 16, 4, 6, 1, 1, 0, False, 1, 2, 2048, "full", "bf16", 100),
    Run("bloom_184B_h12288_L100_a64_n48_dp16tp4pp6_-1", 16, 4, 6, 1, 1, 0, False, 1, 1, 2048, "full", "bf16", 100),
    Run("bloom_203B_h13312_L94_a128_n48_dp8tp4pp12_mb", 8, 4, 12, 1, 1, 0, False, 1, 2, 2048, "full", "bf16", 94),
    Run("dgxc_v24.11.1_grok-1-314b-dev-bf16_8", 2, 4, 1, 1, 2, 0, True, 1, 1, 1024, "none", "bf16", 2),
    Run("dgxc_v24.11.1_grok-1-314b-dev-bf16_16", 4, 4, 1, 1, 4, 0, True, 1, 1, 1024, "none", "bf16", 4),
    Run("dgxc_v24.11.1_llama-3-1-405b-24-09-bf16_32", 2, 8, 1, 2, 1, 0, True, 1, 1, 126, "none", "bf16", 7),
    Run("dgxc_v24.11.1_llama-3-1-405b-24-09-bf16_96", 2, 8, 3, 2, 1, 7, True, 1, 1, 126, "none", "bf16", 21),
    Run("dgxc_v24.11.1_llama-3-1-70b-24-09-bf16_64", 2, 4, 4, 2, 1, 5, True, 1, 1, 128, "none", "bf16", 80),
    Run("dgxc_v24.11.1_llama-3-1-70b-24-09-bf16_128", 4, 4, 4, 2, 1, 5, True, 1, 1, 256, "none", "bf16", 80),
    Run("dgxc_v24.11.1_llama-3-1-8b-24-09-bf16_8", 4, 1, 1, 2, 1, 0, False, 1, 1, 128, "none", "bf16", 32),
    Run("dgxc_v24.11.1_llama-3-1-8b-24-09-bf16_16", 8, 1, 1, 2, 1, 0, False, 1, 1, 256, "none", "bf16", 32),
    Run("dgxc_v24.11.1_maxtext-llama2-70b-bf16_64", 64, 1, 1, 1, 1, 0, False, 3, 2, 128, "selective", "bf16", 80),
    Run("dgxc_v24.11.1_maxtext-llama2-70b-bf16_128", 128, 1, 1, 1, 1, 0, False, 3, 2, 256, "selective", "bf16", 80),
    Run("dgxc_v24.11.1_nemotron4-15b-24-11-bf16_16", 4, 4, 1, 1, 1, 0, True, 1, 4, 64, "none", "bf16", 32),
    Run("dgxc_v24.11.1_nemotron4-15b-24-11-bf16_32", 8, 4, 1, 1, 1, 0, True, 1, 4, 128, "none", "bf16", 32),
    Run("dgxc_v25.02_llama3-70b-finetuning-sft-bf16_3", 2, 4, 4, 1, 1, 5, True, 1, 1, 32, "none", "bf16", 80),
    Run("dgxc_v25.02_llama3-8b-finetuning-sft-bf16_8", 8, 1, 1, 1, 1, 0, False, 1, 1, 32, "none", "bf16", 32),
    Run("dgxc_v25.02_llama3-8b-finetuning-sft-bf16_16", 16, 1, 1, 1, 1, 0, False, 1, 1, 64, "none", "bf16", 32),
    Run("mbridge-26.04.01-gpt_oss_120b-B300-BF16-n64-", 64, 1, 1, 1, 8, 0, False, 1, 4, 1280, "none", "bf16", 36),
    Run("mbridge-26.04.01-gpt_oss_120b-B200-BF16-n64-", 64, 1, 1, 1, 8, 0, False, 1, 4, 1280, "selective", "bf16", 36),
    Run("mbridge-26.04.01-gpt_oss_120b-H100-BF16-n64-", 16, 1, 4, 1, 8, 0, False, 1, 1, 1280, "selective", "bf16", 36),
    Run("mbridge-26.04-gpt_oss_120b-B200-BF16-n64-gbs", 64, 1, 1, 1, 8, 0, False, 1, 4, 1280, "selective", "bf16", 36),
    Run("mbridge-26.04-gpt_oss_120b-H100-BF16-n64-gbs", 16, 1, 4, 1, 8, 0, False, 1, 1, 1280, "selective", "bf16", 36),
    Run("zb-t4-6.2B-zb-2p-p8-b3-m24", 1, 1, 8, 1, 1, 0, False, 0, 3, 72, "none", "fp16", 30),
    Run("zb-t4-6.2B-zb-2p-p8-b3-m32", 1, 1, 8, 1, 1, 0, False, 0, 3, 96, "none", "fp16", 30),
    Run("zb-t4-28.3B-zb-2p-p32-b1-m96", 1, 1, 32, 1, 1, 0, False, 0, 1, 96, "none", "fp16", 62),
    Run("titan-t1-8b-n8-c0f0", 8, 1, 1, 1, 1, 0, False, 3, 2, 16, "selective", "bf16", 32),
    Run("titan-async-8b-bf16-0", 8, 8, 1, 1, 1, 0, True, 3, 12, 96, "selective", "bf16", 32),
    Run("titan-async-8b-bf16-1", 8, 8, 1, 1, 1, 0, True, 3, 12, 96, "selective", "bf16", 32),
    Run("titan-405b-128h100-bf16", 16, 8, 1, 1, 1, 0, True, 3, 2, 32, "full", "bf16", 126),
    Run("nanotron-1.34B-n512", 128, 2, 2, 1, 1, 0, True, 1, 2, 256, "none", "bf16", 16),
    Run("nanotron-8.86B-n512", 128, 4, 1, 1, 1, 0, True, 0, 2, 256, "none", "bf16", 32),
    Run("nanotron-1.34B-n256", 64, 4, 1, 1, 1, 0, True, 0, 4, 256, "none", "bf16", 16),
    Run("nanotron-8.86B-n256", 32, 8, 1, 1, 1, 0, True, 0, 8, 256, "none", "bf16", 32),
    Run("internevo-tp1-z8-n8", 8, 1, 1, 1, 1, 0, False, 1, 2, 64, "none", "bf16", 32),
    Run("internevo-tp2-z-1-n8", 4, 2, 1, 1, 1, 0, False, 1, 4, 64, "none", "bf16", 32),
    Run("maxtext-llama2-7b-h100", 8, 1, 1, 1, 1, 0, False, 3, 2, 16, "selective", "bf16", 32),
    Run("automodel-kimi_k2-n256-gbs512", 32, 1, 8, 1, 32, 4, False, 3, 1, 512, "full", "bf16", 61),
    Run("automodel-gpt_oss_20b-n8-gbs256", 8, 1, 1, 1, 8, 0, False, 3, 2, 256, "none", "bf16", 24),
    Run("automodel-gpt_oss_120b-n64-gbs512", 64, 1, 1, 1, 64, 0, False, 3, 2, 512, "none", "bf16", 36),
    Run("moezoo-qwen3-235b-gb200-bf16", 32, 1, 8, 1, 8, 0, False, 1, 1, 8192, "none", "bf16", 94),
    Run("alpa-intra-gpt-n1-auto_sharding-dp1tp1", 1, 1, 1, 1, 1, 0, False, 0, 8, 8, "full", "fp16", 8),
    Run("mcore-ci-deepseek_proxy_fsdp_ep2_fsdp2_ep_ov", 8, 1, 1, 1, 2, 0, True, 3, 4, 32, "none", "bf16", 2),
    Run("mcore-ci-gpt3_mcore_cp2_pp2_ep2_te_4experts2", 2, 1, 2, 2, 2, 0, True, 0, 4, 32, "none", "bf16", 12),
)
# fmt: on


def layout_of(run: Run) -> Layout:
    """The layout of a run."""
    schedule = "" if run.pp == 1 else "interleaved" if run.vpp > 1 else "1f1b"
    return Layout(
        dp=run.dp,
        tp=run.tp,
        cp=run.cp,
        ep=run.ep,
        pp=run.pp,
        virtual_stages=max(1, run.vpp),
        schedule=schedule,
        sequence_parallel=run.sequence_parallel,
        zero=run.zero,
        micro_batch=run.micro_batch,
        global_batch=run.global_batch,
        recompute=run.recompute,
        precision=run.precision,
    )
