"""What vLLM's benchmarks take besides Trivet's own arguments: accepted where a value asks for what happens here anyway,
else refused by name, with the place where the like is set."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_SWITCH_NAMES = """
aggregate_engine_logging allow_deprecated_quantization cudagraph_metrics data_parallel_external_lb
data_parallel_hybrid_lb data_parallel_multi_port_external_lb dcp_q_replicate disable_cascade_attn
disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_stats
disable_nccl_for_dp_synchronization disable_sliding_window enable_batch_sharded_sampling enable_chunked_prefill
enable_cumem_allocator enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel
enable_fault_tolerance enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing enable_log_requests
enable_logging_iteration_details enable_lora enable_mamba_cache_stochastic_rounding
enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds
enable_moe_shared_loras enable_multimodal_chat enable_nccl_comm_suspend enable_prompt_embeds
enable_return_routed_experts enable_shm_tensor_arena enable_sleep_mode enable_tower_connector_lora
enable_trace_replay fail_on_environ_validation fully_sharded_loras hf_enable_torch_compile interleave_mm_strings
jit_monitor_verbose kv_cache_metrics kv_sharing_fast_prefill language_model_only
long_prefill_token_threshold_adaptive mm_device_do_normalize mm_encoder_only no_reranker numa_bind
prequeue_requests profile ray_workers_use_nsight return_sampling_mask scheduler_reserve_full_isl
skip_mm_profiling skip_tokenizer_init sleep_mode_offload_cudagraph specialize_active_lora swa_bounded_replay
use_fp64_gumbel use_replayssm use_tqdm_on_load
"""
_OTHER_NAMES = """
additional_config all2all_backend allowed_local_media_path allowed_media_domains asr_max_audio_len_sec
asr_min_audio_len_sec attention_backend attention_config aux_output_config backend code_revision
collect_detailed_traces compilation_config config_format convert cp_kv_cache_interleave_size
cpu_distributed_timeout_seconds cpu_offload_gb cpu_offload_params custom_histogram_buckets data_parallel_address
data_parallel_backend data_parallel_rank data_parallel_rpc_port data_parallel_size data_parallel_size_local
data_parallel_start_rank dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend
dcp_kv_cache_interleave_size decode_context_parallel_size default_mm_loras device_ids diffusion_config
distributed_executor_backend distributed_timeout_seconds download_dir dp_sync_interval ec_manager_config
ec_transfer_config elastic_ep_max_dp_size engram_config eplb_config expert_placement_strategy
fault_tolerance_config gdn_prefill_backend hf_config_path hf_max_batch_size hf_name hf_overrides hf_split
hf_subset hf_token ignore_patterns io_processor_plugin ir_op_priority jit_monitor_mode kda_decode_backend
kda_prefill_backend kernel_config kv_cache_dtype_skip_layers kv_cache_metrics_sample kv_events_config
kv_offloading_backend kv_offloading_size kv_transfer_config limit_mm_per_prompt linear_backend load_format
log_config_file log_level logging_config logits_processors logprobs_mode lora_assignment lora_dtype lora_path
lora_target_modules mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds
mamba_ssm_cache_dtype mamba_ssu_algorithm master_addr master_port max_cpu_loras max_cudagraph_capture_size
max_lora_cls_labels max_lora_rank max_loras max_num_active_seqs max_num_scheduled_tokens
max_parallel_loading_workers media_io_kwargs mm_encoder_attn_backend mm_encoder_attn_dtype
mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_tp_mode
mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device
mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc model_class_overrides model_impl
model_loader_extra_config moe_backend nnodes node_rank numa_bind_cpus numa_bind_nodes offload_backend
offload_group_size offload_num_in_group offload_params offload_prefetch_step optimization_level
otlp_traces_endpoint override_generation_config per_request_spec_decode_metrics performance_mode
pipeline_parallel_size pooler_config prefill_context_parallel_size prefill_schedule_interval
prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit profiler_config pt_load_map_location
quantization_config random_batch_size random_mm_base_items_per_request random_mm_bucket_config
random_mm_limit_mm_per_prompt random_mm_num_mm_items_range_ratio reasoning_config reasoning_parser
reasoning_parser_plugin renderer_num_workers replayssm_buffer_len runner safetensors_load_strategy
safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_cls show_hidden_metrics_for_version
shutdown_timeout sleep_preserve_parameter_names sparse_indexer_topk_backend spec_method spec_model spec_tokens
speculative_config stream_interval structured_outputs_config tensor_parallel_size tokenizer_mode
tokenizer_revision ubatch_size video_pruning_method video_pruning_rate watermark watermark_config
weight_transfer_config worker_cls worker_extension_cls
"""

#: those that take no value, or are switched off by ``no_`` before their name
SWITCHES = frozenset(_SWITCH_NAMES.split())
_OTHERS = frozenset(_OTHER_NAMES.split())


# Short names.
_SHORT: Mapping[str, str] = MappingProxyType(
    {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}
)

_ONE, _AUTO = frozenset({"1"}), frozenset({"auto"})
# Values that ask for what happens here anyway. Switches that are off ask for nothing, except those of ``_ON``.
_SAME: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "config_format": _AUTO,
        "convert": frozenset({"auto", "none"}),
        "cpu_offload_gb": frozenset({"0"}),
        "data_parallel_size": _ONE,
        "decode_context_parallel_size": _ONE,
        "disable_cascade_attn": frozenset({"true"}),
        "disable_custom_all_reduce": frozenset({"true"}),
        "disable_log_stats": frozenset({"true"}),
        "distributed_executor_backend": frozenset({"uni"}),
        "enable_chunked_prefill": frozenset({"true"}),
        "language_model_only": frozenset({"true"}),
        "linear_backend": _AUTO,
        "load_format": _AUTO,
        "logprobs_mode": frozenset({"raw_logprobs"}),
        "model_impl": _AUTO,
        "moe_backend": _AUTO,
        "nnodes": _ONE,
        "node_rank": frozenset({"0"}),
        "offload_backend": _AUTO,
        "pipeline_parallel_size": _ONE,
        "prefill_context_parallel_size": _ONE,
        "prefix_caching_hash_algo": frozenset({"sha256"}),
        "random_batch_size": _ONE,
        "runner": frozenset({"auto", "generate"}),
        "stream_interval": _ONE,
        "tensor_parallel_size": _ONE,
        "tokenizer_mode": _AUTO,
        "use_tqdm_on_load": frozenset({"true"}),
    }
)
_ON = frozenset(
    {"enable_chunked_prefill", "fail_on_environ_validation", "scheduler_reserve_full_isl", "swa_bounded_replay"}
)

# Where the like is set.
_WHERE: Mapping[str, str] = MappingProxyType(
    {
        "attention_backend": "plugins.attention chooses the attention",
        "attention_config": "plugins.attention has its options",
        "compilation_config": "plugins.model.compile compiles the native model, --cudagraph-capture-sizes and "
        "--enforce-eager decide about CUDA graphs",
        "cpu_offload_gb": "nothing of the model is kept elsewhere; --quantization makes it smaller",
        "data_parallel_size": "one process serves the model",
        "distributed_executor_backend": "plugins.executor chooses the executor",
        "download_dir": "the environment variable HF_HUB_CACHE says where hub models are kept",
        "enable_chunked_prefill": "prompts longer than --max-num-batched-tokens are always cut",
        "hf_token": "log in with `hf auth login`, or set the environment variable HF_TOKEN",
        "kv_offloading_size": "plugins.cache_tier keeps blocks in memory and on disk",
        "kv_transfer_config": "plugins.connector chooses a connector",
        "load_format": "the files of the model decide: safetensors or GGUF",
        "max_cudagraph_capture_size": "--cudagraph-capture-sizes lists the sizes",
        "max_num_scheduled_tokens": "--max-num-batched-tokens bounds the tokens of a step",
        "model_impl": "plugins.model chooses the model: native or transformers",
        "optimization_level": "plugins.model.compile compiles the native model",
        "override_generation_config": "--generation-config names a folder, or vllm for none",
        "pipeline_parallel_size": "one process serves the model",
        "quantization_config": "plugins.quantization has the options",
        "scheduler_cls": "plugins.scheduler chooses the scheduler",
        "spec_method": "plugins.drafter chooses a drafter",
        "spec_model": "plugins.drafter chooses a drafter",
        "spec_tokens": "plugins.drafter chooses a drafter",
        "speculative_config": "plugins.drafter chooses a drafter",
        "structured_outputs_config": "plugins.grammar chooses the grammar",
        "tensor_parallel_size": "one process serves the model",
        "tokenizer_mode": "plugins.tokenizer chooses the tokenizer",
        "worker_cls": "plugins.runner chooses the runner",
    }
)


def full_name(name: str) -> str:
    """The long name for one of vLLM's short ones."""
    return _SHORT.get(name, name)


def is_known(name: str) -> bool:
    """Whether vLLM's benchmarks have an argument of this name, and Trivet's have not."""
    return name in SWITCHES or name in _OTHERS


def problem(name: str, value: str | None) -> str | None:
    """Why an argument of vLLM's cannot be taken, None if ``value`` asks for what happens anyway."""
    changes_nothing = _SAME.get(name, frozenset())
    if value is not None and value.lower() in changes_nothing:
        return None
    if value == "false" and name in SWITCHES - _ON:
        return None
    same = " or ".join(sorted(changes_nothing - {"true"}))
    only = f"; {same} is accepted, since it changes nothing" if same else ""
    where = f": {_WHERE[name]}" if name in _WHERE else ""
    return f"an option of vLLM's that is not here{where}{only}"
