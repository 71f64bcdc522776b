"""All fields of torchtitan's configuration files, and how they are handled.

The names and defaults are those of ``JobConfig`` in every version that reads TOML: from torchtitan's first commit to
0.2.2. Newer versions are configured in Python. A field is in exactly one of these tables: `READ`, `RENAMED`, `NOTED`,
`REFUSED` or `UNIMPORTANT`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

READ: dict[str, Any] = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "2",
    "model.converters": [],
    "parallelism.context_parallel_degree": 1,
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.expert_parallel_degree": 1,
    "parallelism.expert_tensor_parallel_degree": 1,
    "parallelism.fsdp_reshard_after_forward": "default",
    "parallelism.module_fqns_per_model_part": None,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.pipeline_parallel_first_stage_less_layers": 1,
    "parallelism.pipeline_parallel_last_stage_less_layers": 1,
    "parallelism.pipeline_parallel_layers_per_stage": None,
    "parallelism.pipeline_parallel_microbatch_size": 1,
    "parallelism.pipeline_parallel_microbatches": None,
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "parallelism.tensor_parallel_degree": 1,
    "training.data_parallel_type": "fsdp",
    "training.global_batch_size": -1,
    "training.local_batch_size": 8,
    "training.mixed_precision_param": "bfloat16",
    "training.seq_len": 2048,
}
"""Fields that decide what is emulated, with torchtitan's defaults."""

RENAMED = {
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.context_parallel_rotate_method": "parallelism.context_parallel_rotate_method",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "experimental.enable_compiled_autograd": "parallelism.enable_compiled_autograd",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatches",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_schedule_csv": "parallelism.pipeline_parallel_schedule_csv",
    "experimental.pipeline_parallel_split_points": "parallelism.pipeline_parallel_split_points",
    "memory_estimation.enabled": "memory_estimation.enable",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
    "training.deterministic": "debug.deterministic",
    "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "training.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "training.sequence_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
}
"""Current name of each field that was renamed."""


class Field(NamedTuple):
    """A field that the emulator does not model."""

    text: str
    """What is emulated instead, and whether times and memory are too high or too low; or what to do instead."""
    default: Any = False
    exact: tuple[Any, ...] = ()
    """Values for which the emulation is exact. Empty: only the default."""

    def is_exact(self, value: Any) -> bool:
        """Return whether the emulation is exact for a value."""
        return value in (self.exact or (self.default,))


PACKED = "attention within each sample is emulated, so times are too low where packed samples attend to each other"
_EIGHT_BITS = Field("FP8 is emulated as bfloat16, so times are too high", False, (False, ""))
_SLOWER = Field("its cost is not emulated, so times are too low")
_FUSED = "a fused optimizer step is emulated, so times are too low"
_PROFILED = Field("an iteration without the profiler is emulated, so times of profiled iterations are too low")

NOTED = {
    "activation_checkpoint.debug": _SLOWER,
    "compile.backend": Field("Inductor's kernels are emulated, so times may be too low", "inductor"),
    "compile.components": Field(
        "model and loss are emulated with fused kernels, so times and memory are too low",
        ["model", "loss"],
        (["model", "loss"], ["loss", "model"]),
    ),
    "compile.enable": Field(
        "fused kernels are emulated, so times and memory are too low without torch.compile", exact=(True,)
    ),
    "debug.deterministic": _SLOWER,
    "fault_tolerance.enable": _SLOWER,
    "fault_tolerance.semi_sync_method": Field(
        "gradients are emulated as reduced in every iteration, so times are too high", None, (None, "")
    ),
    "float8.enable_float8_linear": _EIGHT_BITS,
    "float8.emulate": _SLOWER,
    "model.attn_mask_type": Field(PACKED, "causal", ("block_causal",)),
    "optimizer.fused": Field(_FUSED, None, (None, True)),
    "optimizer.early_step_in_backward": Field("gradients are emulated as held until the update, so memory is too high"),
    "optimizer.implementation": Field(_FUSED, "fused"),
    "parallelism.context_parallel_load_balancer": Field(
        "context-parallel ranks with equal work are emulated, so times are too low", "headtail", ("headtail", "ptrr")
    ),
    "parallelism.disable_loss_parallel": Field(
        "a loss divided over tensor-parallel ranks is emulated, so times and memory are too low"
    ),
    "parallelism.enable_async_tensor_parallel": Field(
        "tensor-parallel messages are emulated without overlap, so times are too high"
    ),
    "parallelism.enable_compiled_autograd": Field(
        "the backward is emulated without compiled autograd, so times may be too high"
    ),
    "parallelism.expert_parallel_comm_backend": Field(
        "NCCL's all-to-all is emulated, so times are too high", "standard"
    ),
    "profiling.enable_memory_snapshot": _SLOWER,
    "profiling.enable_profiling": _PROFILED,
    "profiling.run_profiler": _PROFILED,
    "quantize.dense.float8.emulate": _SLOWER,
    "quantize.linear.float8.emulate": _SLOWER,
    "training.dtype": Field(
        "float32 main weights, gradients and optimizer states are emulated, so memory and times are too high", "float32"
    ),
    "training.enable_cpu_offload": Field(
        "parameters, gradients and optimizer states are emulated on the device, so memory is too high and times are "
        "too low"
    ),
    "training.enable_float8_linear": _EIGHT_BITS,
    "training.enable_fp8_linear": _EIGHT_BITS,
    "training.fp8_linear": _EIGHT_BITS,
    "training.gc_debug": _SLOWER,
    "training.mixed_precision_reduce": Field(
        "float32 gradients are emulated, so memory and times are too high", "float32"
    ),
}
"""Fields that change time or memory and are not emulated exactly."""

_NO_TRAINING = Field("it is no training then")
_WRITE_STAGES = "give module_fqns_per_model_part instead"

REFUSED = {
    "checkpoint.create_seed_checkpoint": _NO_TRAINING,
    "comm.mode": Field(_NO_TRAINING.text, "default"),
    "experimental.pipeline_parallel_split_mode": Field(_WRITE_STAGES, "manual"),
    "experimental.torch_spmd": Field("leave it out"),
    "memory_estimation.enable": _NO_TRAINING,
    "estimate.memory": _NO_TRAINING,
    "optimizer.name": Field("the memory of Adam and AdamW is known", "AdamW", ("AdamW", "Adam")),
    "parallelism.pipeline_parallel_schedule_csv": Field("emulated are schedules by name", "", ("", None)),
    "parallelism.pipeline_parallel_split_points": Field(_WRITE_STAGES, [], ([], "")),
    "training.enable_selective_ac": Field("give activation_checkpoint.mode instead"),
    "training.enable_loss_parallel": Field("give parallelism.disable_loss_parallel instead", True),
}
"""Fields for which other values raise an error, because the emulation would be meaningless."""

_UNIMPORTANT = {
    "activation_checkpoint": "determinism_check early_stop memory_budget per_op_sac_force_recompute_mm_shapes_by_fqns "
    "preserve_rng_state visualize_memory_budget_pareto",
    "checkpoint": "async_mode enable enable_checkpoint enable_first_step_checkpoint enable_ft_dataloader_checkpoints "
    "exclude_from_loading export_dtype folder initial_load_in_hf initial_load_in_hf_quantized initial_load_model_only "
    "initial_load_model_weights_only initial_load_path interval interval_type keep_latest_k last_save_in_hf "
    "last_save_in_safetensors_format last_save_model_only last_save_model_weights_only load_only load_step "
    "model_weights_only",
    "comm": "init_timeout_seconds save_traces_file_prefix save_traces_folder timeout_seconds trace_buf_size "
    "train_timeout_seconds",
    "debug": "deterministic_warn_only moe_force_load_balance seed",
    "estimate": "mode",
    "experimental": "custom_args_module custom_import custom_model_path",
    "fault_tolerance": "fragment_sync_delay fragment_update_alpha group_size min_replica_size "
    "module_fqns_per_model_fragment num_fragments process_group process_group_timeout_ms replica_id should_quantize "
    "sync_steps",
    "float8": "enable_fsdp_float8_all_gather filter_fqns force_recompute_fp8_weight_in_bwd moe_fqns_prototype "
    "precompute_float8_dynamic_scale_for_fsdp recipe_name scaling_type_grad_output scaling_type_input "
    "scaling_type_weight",
    "job": "config_file custom_config_module description dump_folder print_args print_config save_config_file "
    "save_config_folder use_for_integration_test",
    "lr_scheduler": "decay_ratio decay_type lr_min min_lr_factor total_steps warmup_steps",
    "memory_estimation": "disable_fake_mode",
    "metrics": "disable_color_printing disable_logging_from_checkpoint enable_color_printing enable_tensorboard "
    "enable_wandb log_freq rank_0_only save_for_all_ranks save_tb_folder",
    "model": "flavor hf_assets_path name norm_type print_after_conversion tokenizer_path use_flex_attn",
    "mx": "filter_fqns moe_fqns_prototype mxfp8_dim1_cast_kernel_choice recipe_name use_fp8_dim1_cast_triton_kernel",
    "optimizer": "beta1 beta2 eps lr weight_decay",
    "parallelism": "context_parallel_rotate_method pipeline_parallel_expert_parallel_overlap",
    "profiling": "profile_every_x_iter profile_freq profiler_active profiler_warmup save_memory_snapshot_folder "
    "save_traces_folder",
    "quantize.dense.float8": "enable_fsdp_float8_all_gather filter_fqns precompute_float8_dynamic_scale_for_fsdp "
    "recipe_name",
    "quantize.dense.mx": "filter_fqns mxfp8_dim1_cast_kernel_choice recipe_name",
    "quantize.grouped_mm.float8": "fqns",
    "quantize.grouped_mm.mx": "fqns recipe_name",
    "quantize.linear.float8": "enable_fsdp_float8_all_gather filter_fqns precompute_float8_dynamic_scale_for_fsdp "
    "recipe_name",
    "quantize.linear.mx": "filter_fqns mxfp8_dim1_cast_kernel_choice recipe_name",
    "quantize.moe.float8": "fqns",
    "quantize.moe.mx": "fqns",
    "training": "checkpoint_folder checkpoint_interval checkpoint_interval_type dataset dataset_path "
    "enable_fsdp_float8_all_gather enable_fsdp_fp8_all_gather float8_scaling_type_grad_output "
    "float8_scaling_type_input float8_scaling_type_weight gc_freq max_norm "
    "precompute_float8_dynamic_scale_for_fsdp seed steps warmup_pct warmup_steps",
    "training.dataloader": "num_workers persistent_workers pin_memory prefetch_factor",
    "validation": "dataset dataset_path enable enabled freq local_batch_size seq_len steps",
    "validation.dataloader": "num_workers persistent_workers pin_memory prefetch_factor",
}
UNIMPORTANT = tuple(f"{table}.{name}" for table, names in _UNIMPORTANT.items() for name in names.split())
"""Fields that do not change time and memory of an iteration.

This includes details of other fields: of quantization (``model.converters``), ``memory_budget`` (of
``activation_checkpoint.mode``), and of fault tolerance (``fault_tolerance.enable``).
"""
