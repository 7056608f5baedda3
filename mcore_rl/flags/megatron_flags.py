"""The class of each flag of Megatron's parser in RL: honoured, refused, or without effect.

One table per class, flags by destination. A flag's class depends on where Megatron 0.19.2 reads it:
what builds and runs the model, the optimizer, DDP, checkpoints and process groups runs here, too;
`pretrain()`, its loop, its data loaders, its evaluation and its logging do not. A test checks that
each flag of Megatron is in exactly one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Refusal(NamedTuple):
    """The reason why RL cannot honour a flag, and the remedy."""

    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.found}; {self.remedy}"


# The values are names separated by blanks.
HONOURED: Mapping[str, str] = {
    "the run: read by mcore_rl": """
        hidden_dropout attention_dropout micro_batch_size global_batch_size exit_interval
        exit_duration_in_mins exit_signal_handler exit_signal seed trust_remote_code tensorboard_dir
        wandb_project wandb_exp_name wandb_save_dir wandb_entity rl_partial_rollouts
    """,
    "checkpoints: Megatron's saving and loading": """
        save save_interval save_retain_interval load load_main_params_from_ckpt finetune
        pretrained_checkpoint ckpt_step exit_on_missing_checkpoint ckpt_format
        auto_detect_ckpt_format ckpt_convert_update_legacy_dist_opt_format ckpt_fully_parallel_save
        ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo
        ckpt_fully_parallel_save_process_group ckpt_fully_parallel_load_process_group
        ckpt_assume_constant_structure ckpt_load_validate_sharding_integrity
        strict_fsdp_dtensor_load dist_ckpt_strictness dist_ckpt_optim_fully_reshardable
        distrib_optim_fully_reshardable_mem_efficient verify_integrity stream_ckpt_dequant
        no_load_optim no_load_rng dist_ckpt_workers async_save
    """,
    "the optimizer and its schedule": """
        weight_decay apply_wd_to_qk_layernorm clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum
        muon_momentum muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec
        muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_extra_scale_factor
        muon_scalar_optimizer lion_beta1 lion_beta2 no_weight_decay_cond_type optimizer
        optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d dump_param_to_param_group_map pin_cpu_grads pin_cpu_params
        lr_decay_style lr_wsd_decay_style lr_decay_iters lr_wsd_decay_iters lr_warmup_fraction
        lr_warmup_iters lr_warmup_init override_opt_param_scheduler
        use_checkpoint_opt_param_scheduler start_weight_decay end_weight_decay
        weight_decay_incr_style lr min_lr decoupled_lr decoupled_min_lr loss_scale
        initial_loss_scale min_loss_scale loss_scale_window hysteresis
        overlap_param_gather_with_optimizer_step use_precision_aware_optimizer main_grads_dtype
        main_params_dtype exp_avg_dtype exp_avg_sq_dtype
    """,
    "data parallelism: DDP, the distributed optimizer, Megatron-FSDP": """
        grad_reduce_in_bf16 accumulate_allreduce_grads_in_fp32
        use_megatron_fsdp overlap_grad_reduce ddp_num_buckets ddp_bucket_size
        ddp_pad_buckets_for_high_nccl_busbw ddp_reduce_scatter_with_fp32_accumulation
        ddp_param_name_patterns_for_fp32_local_accumulation ddp_average_in_collective
        overlap_param_gather align_param_gather use_distributed_optimizer
        use_layer_wise_param_layout nccl_ub disable_symmetric_registration fsdp_manual_registration
        create_all_gather_group data_parallel_sharding_strategy outer_dp_sharding_strategy
        gradient_reduce_div_fusion fsdp_double_buffer suggested_communication_unit_size
        keep_fp8_transpose_cache num_distributed_optimizer_instances fp4_param_gather
        fp8_param_gather megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype
        megatron_fsdp_grad_comm_dtype megatron_fsdp_enable_fine_grained_param_gather
        megatron_fsdp_max_pool_double_buffer fsdp_db_use_persist_buf_on_alloc_fail
    """,
    "Megatron's start: process groups, random states, logging": """
        pipeline_model_parallel_comm_backend deterministic_mode
        batch_invariant_mode te_rng_tracker data_parallel_random_init
        distributed_backend distributed_timeout_minutes local_rank nccl_communicator_config_path
        use_gloo_process_groups use_sharp sharp_enabled_group high_priority_stream_groups
        flight_recorder_dump_path flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout
        flight_recorder_include_stack_trace flight_recorder_include_only_active
        flight_recorder_extra_dump_on_exec disable_jit_fuser logging_level enable_experimental
        enable_one_logger one_logger_project one_logger_run_name one_logger_async
    """,
    "the layout of the model over ranks": """
        tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel
        context_parallel_size hierarchical_context_parallel_sizes expert_model_parallel_size
        expert_tensor_parallel_size use_ring_exchange_p2p overlap_p2p_comm_warmup_flush
        microbatch_group_size_per_vp_stage account_for_embedding_in_pipeline_split
        account_for_loss_in_pipeline_split decoder_first_pipeline_num_layers
        decoder_last_pipeline_num_layers pipeline_model_parallel_layout
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank overlap_p2p_comm
        cp_comm_type
    """,
    "how the model is computed: Megatron's TransformerConfig and layers": """
        perform_initialization use_cpu_initialization fp16 bf16
        overlap_dispatch_backward_with_experts_wgrad cpu_offloading_num_layers
        cpu_offloading_retain_pinned_cpu_buffers attention_backend flash_attention_version
        fp32_residual_connection init_model_with_meta_device apply_query_key_layer_scaling
        disable_bf16_reduced_precision_matmul fused_residual_rmsnorm use_transformer_engine_op_fuser
        recompute_granularity recompute_method recompute_num_layers distribute_saved_activations
        recompute_modules fp8 fp8_recipe fp8_quantizer_factory fp8_margin fp8_interval
        fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_output_proj first_last_layers_bf16
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 use_kitchen_attention
        kitchen_attention_backend fp4 fp4_recipe fp4_quantizer_factory moe_shared_expert_overlap
        use_grouped_gemm_for_shared_expert moe_router_padding_for_quantization
        moe_router_padding_for_fp8 moe_router_dtype moe_router_bias_update_rate
        moe_grouped_gemm moe_z_loss_coeff
        moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend
        moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs moe_layer_recompute
        moe_permute_fusion moe_router_fusion moe_flex_dispatcher_num_sms moe_deepep_num_sms
        moe_hybridep_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_hybridep_num_sms_preprocessing enable_cuda_graph cuda_graph_warmup_steps cuda_graph_impl
        clone_scatter_output_in_embedding use_te_activation_func symmetric_ar_type
        mlp_chunks_for_training transformer_impl fine_grained_activation_offloading offload_modules
        min_offloaded_tensor_size delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
        activation_offload_fraction fine_grained_offloading_max_inflight_offloads
        use_rotary_position_embeddings make_vocab_size_divisible_by recompute_activations
        masked_softmax_fusion bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion
        apply_rope_fusion no_persist_layer_norm gradient_accumulation_fusion
        attention_softmax_in_fp32 test_mode padded_vocab_size pad_vocab_size
        moe_router_load_balancing_type moe_aux_loss_coeff mla_down_proj_fusion
        cuda_graph_scope_deprecated cuda_graph_modules te_precision_config_file spec
        mtp_num_layers mtp_loss_scaling_factor mtp_detach_heads dsa_indexer_loss_coeff
        dsa_indexer_use_sparse_loss dsa_kernel_backend dsa_indexer_k_norm_fp32
        mamba_training_ssm_states_dtype use_fused_weighted_squared_relu
    """,
}

# Flags that change what a model computes. One that config.json does not imply contradicts it, even
# if Megatron supports it: vLLM would still compute what config.json says.
ARCHITECTURE = frozenset(
    """
    activation_func_clamp_value add_bias_linear add_qkv_bias
    apply_residual_connection_post_layernorm attention_output_gate dsa_indexer_head_dim
    dsa_indexer_k_norm_epsilon dsa_indexer_n_heads dsa_indexer_rope_interleaved
    dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset
    dsa_indexer_topk dsa_indexer_topk_freq encoder_num_layers experimental_attention_variant
    ffn_hidden_size glu_linear_offset group_query_attention heterogeneous_layers_config_encoded_json
    heterogeneous_layers_config_path hidden_size hybrid_layer_pattern hybrid_override_pattern
    kv_channels kv_lora_rank layernorm_epsilon layernorm_zero_centered_gamma linear_attention_freq
    linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
    linear_value_head_dim mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim
    moe_apply_probs_on_input moe_ffn_hidden_size moe_latent_size
    moe_layer_freq moe_mlp_glu_interleave_size moe_router_enable_expert_bias moe_router_group_topk
    moe_router_num_groups moe_router_pre_softmax moe_router_score_function moe_router_topk
    moe_router_topk_scaling_factor moe_shared_expert_gate moe_shared_expert_glu_interleave_size
    moe_shared_expert_intermediate_size moe_single_grouped_weight mscale mscale_all_dim
    multi_latent_attention no_rope_freq normalization num_attention_heads num_experts
    num_layers num_query_groups openai_gelu position_embedding_type q_lora_rank qk_head_dim
    qk_l2_norm qk_layernorm qk_pos_emb_head_dim quick_geglu rope_scaling_factor rope_type
    rotary_base rotary_interleaved rotary_percent rotary_scaling_factor
    rotary_seq_len_interpolation_factor softmax_type squared_relu swiglu
    untie_embeddings_and_output_weights use_mup use_rope_scaling v_head_dim vocab_size
    window_attn_skip_freq window_size yarn_beta_fast yarn_beta_slow
    yarn_correction_range_round_to_int yarn_original_max_position_embeddings
    """.split()
)

# Reasons, with our flags to use instead, and the flags. They are removed from what Megatron parses:
# with them it would open files, ask the Hub and check lengths for nothing.
WITHOUT_EFFECT: Mapping[str, str] = {
    "prompts are --rl-prompts": """
        data_path train_data_path valid_data_path test_data_path data_args_path
        per_split_data_args_path split mock_data per_dataset_sequences_path
        dataloader_fast_cache_load dataloader_defer_npy_index_mmap data_cache_path mmap_bin_files
        sample_rate mask_prob short_seq_prob num_workers reset_position_ids reset_attention_mask
        dataloader_inter_document_masking eod_mask_loss num_dataset_builder_threads
        object_storage_cache_path mid_level_dataset_surplus allow_ambiguous_pad_tokens
        phase_transition_iterations dataloader_type sft create_attention_mask_in_dataloader
        decrease_batch_size_if_needed fim_data fim_rate fim_spm_rate fim_split_sample
        fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token fim_suffix_token
        fim_pad_token fim_eod_token
    """,
    "lengths are --rl-max-prompt-tokens and --rl-max-response-tokens": """
        seq_length decoder_seq_length max_position_embeddings
    """,
    "evaluation is --rl-eval-prompts and --rl-eval-interval": """
        eval_iters eval_interval start_eval_at_iter eval_global_batch_size eval_micro_batch_size
        full_validation multiple_validation_sets validation_set_names
    """,
    "every step has its line in metrics.jsonl": """
        log_interval log_params_norm log_throughput log_progress tensorboard_log_interval
        tensorboard_queue_size log_timers_to_tensorboard log_loss_scale_to_tensorboard
        log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_memory_interval
        log_device_memory_used log_num_zeros_in_grad log_max_attention_logit
        log_world_size_to_tensorboard log_energy moe_per_layer_logging timing_log_level
        timing_log_option barrier_with_L1_time app_tag_run_name app_tag_run_version
    """,
    "a trace is --rl-trace": """
        profile profile_step_start profile_step_end use_pytorch_profiler
        pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack
        pytorch_profiler_collect_chakra profile_ranks record_memory_history memory_snapshot_path
        record_shapes nvtx_ranges
    """,
    "a non-finite gradient is --rl-on-nonfinite-grad": """
        check_for_nan_in_loss_and_grad
    """,
    "a job is started again by its launcher, docs/using/never_lose_a_run.md": """
        inprocess_restart inprocess_max_iterations inprocess_monitor_thread_interval
        inprocess_monitor_process_interval inprocess_progress_watchdog_interval
        inprocess_heartbeat_interval inprocess_soft_timeout inprocess_hard_timeout
        inprocess_heartbeat_timeout inprocess_barrier_timeout inprocess_completion_timeout
        inprocess_last_call_wait inprocess_termination_grace_time inprocess_granularity
        inprocess_active_world_size inprocess_empty_cuda_cache enable_ft_package calc_ft_timeouts
        ft_num_warmup_iters
    """,
    "--rl-stage-timeout-seconds reports stuck ranks": """
        log_straggler straggler_ctrlr_port straggler_minmax_count disable_straggler_on_startup
        run_workload_inspector_server distributed_timeout_seconds_after_init
    """,
    "checkpoints are written as docs/using/never_lose_a_run.md says": """
        non_persistent_save_interval non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir
        non_persistent_local_ckpt_algo async_strategy use_persistent_ckpt_worker
        async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm replication
        replication_jump replication_factor
    """,
    "Megatron's own training loop reads it": """
        empty_unused_memory_level check_weight_hash_across_dp_replicas_interval
        gpu_sniff_test_interval train_sync_interval manual_gc manual_gc_interval manual_gc_eval
        align_grad_reduce optimizer_cuda_graph save_params_interval save_activations_interval
        save_tokens_per_expert_interval save_wgrads_interval save_dgrads_interval
        result_rejected_tracker_filename error_injection_rate error_injection_type rerun_mode
        check_for_spiky_loss fault_injector_ranks fault_injector_num_ranks
        fault_injector_fault_types fault_injector_fault_probabilities fault_injector_fault_delay
        fault_injector_delay_start_iteration fault_injector_mtti_seconds
        fault_injector_offset_seconds fault_injector_seed moe_routing_trace_path
        moe_routing_trace_max_training_iters moe_routing_trace_capture_logits
        moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights
    """,
    "log-probs are taken by mcore_rl": """
        cross_entropy_loss_fusion cross_entropy_fusion_impl fp16_lm_cross_entropy
        defer_embedding_wgrad_compute wgrad_deferral_limit
    """,
    "vLLM generates": """
        inference_batch_times_seqlen_threshold max_tokens_to_oom use_legacy_static_engine
        inference_max_requests inference_max_seq_length inference_dynamic_batching
        inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_paused_buffer_size_gb
        inference_dynamic_batching_mamba_memory_ratio inference_dynamic_batching_block_size
        inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens
        inference_dynamic_batching_num_cuda_graphs
        inference_dynamic_batching_track_paused_request_events
        inference_dynamic_batching_track_generated_token_events decode_only_cuda_graphs
        inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens
        inference_dynamic_batching_unified_memory_level enable_chunked_prefill
        num_speculative_tokens inference_dynamic_batching_enable_prefix_caching
        inference_dynamic_batching_prefix_caching_eviction_policy
        inference_dynamic_batching_prefix_caching_coordinator_policy
        inference_dynamic_batching_prefix_caching_routing_alpha
        inference_dynamic_batching_prefix_caching_mamba_gb
        inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution
        inference_dynamic_batching_sampling_backend offset_sampling_seed_by_dp_rank
        inference_dynamic_batching_async_sched_mode inference_dynamic_batching_logprobs_mode
        inference_logging_step_interval inference_text_gen_server_logging inference_wandb_logging
        inference_coordinator_port mamba_inference_conv_states_dtype
        mamba_inference_ssm_states_dtype inference_use_synchronous_zmq_collectives
        inference_disable_ep_consensus inference_shards inference_cuda_graph_scope flash_decode
        nccl_all_reduce_for_prefill inference_fuse_tp_communication
        inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
        inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
        mlp_chunks_for_prefill cache_mla_latents moe_pad_experts_for_cuda_graph_inference
    """,
    "the tokenizer is that of --rl-hf-checkpoint": """
        tokenizer_type tokenizer_model vocab_file merge_file metadata_path special_tokens
        tiktoken_pattern tiktoken_num_special_tokens tokenizer_sentencepiece_legacy
        tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast
        tokenizer_hf_no_include_special_tokens null_tokenizer_eod_id null_tokenizer_pad_id
        chat_template vocab_extra_ids sft_tokenizer_prompt_format
    """,
    "weights are read from a checkpoint": """
        init_method_std embedding_init_method_std init_method_xavier_uniform
    """,
    "the model has no such part": """
        is_hybrid_model mrope_section relative_attention_num_buckets
        relative_attention_max_distance add_position_embedding
        bert_binary_head output_bert_embeddings bert_embedder_type decoder_num_layers
        mtp_use_repeated_layer mtp_standalone mtp_hybrid_override_pattern
        use_grouped_gemm_for_dense_mlp moe_single_grouped_bias
        mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim
        mup_attn_scale_power ict_head_size biencoder_projection_dim
        biencoder_shared_query_context_model ict_load bert_load titles_data_path query_in_block_prob
        use_one_sent_docs evidence_data_path retriever_report_topk_accuracies
        retriever_score_scaling block_data_path embedding_path indexer_batch_size
        indexer_log_interval num_classes img_h img_w num_channels patch_dim classes_fraction
        data_per_class_fraction data_sharding head_lr_mult vision_pretraining
        vision_pretraining_type vision_backbone_type swin_backbone_type mask_type mask_factor
        iter_per_epoch dino_local_img_size dino_local_crops_number dino_head_hidden_size
        dino_bottleneck_size dino_freeze_last_layer dino_norm_last_layer dino_warmup_teacher_temp
        dino_teacher_temp dino_warmup_teacher_temp_epochs
    """,
    "without that kernel of Mamba-2 layers Megatron takes no packed rows": """
        use_mamba_mem_eff_path
    """,
    "it belongs to a flag that is refused": """
        qk_clip_alpha qk_clip_threshold max_seqlen_per_dp_cp_rank use_mp_args_from_checkpoint_args
        use_tokenizer_model_from_checkpoint_args ckpt_convert_save moe_upcycling_granularity
        moe_token_drop_policy moe_pad_expert_input_to_capacity high_priority_a2a_comm_stream
        torch_fsdp2_reshard_after_forward adlr_autoresume_interval moe_paged_stash_page_size
        moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu
        tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs tp_comm_bootstrap_backend
        tp_comm_overlap_cfg logits_save_top_k logits_save_top_p logits_save_top_p_min_k
        logits_save_dtype logits_load_decode_threads logits_load_prefetch_factor
        logits_load_msc_prefetch_depth logits_load_kd_loss_alpha logits_load_ignore_errors
        moe_ncclep_static_shape moe_ncclep_zero_copy moe_router_quantile_balancing_ema
    """,
    "routing replay is --rl-routing-replay": """
        moe_enable_routing_replay
    """,
    "Megatron ignores it": """
        use_flash_attn onnx_safe enable_full_sharding_in_hsdp dist_ckpt_save_pre_mcore_014
        exit_signal_handler_for_dataloader deprecated_use_mcore_models use_dist_ckpt_deprecated
        dist_ckpt_format_deprecated ckpt_fully_parallel_save_deprecated disable_msc_deprecated
    """,
}

WITHOUT_EFFECT_DESTS = frozenset(" ".join(WITHOUT_EFFECT.values()).split())

_COUNTS_STEPS = Refusal(
    "counts differently from RL", "set --rl-num-steps and the batch by --rl-num-* flags"
)
_COUNTS_SAMPLES = Refusal(
    "counts samples", "give the flag that ends in -iters, which counts updates"
)
_NOT_VLLM = Refusal("makes Megatron route differently from vLLM, which samples", "drop it")
_NOT_YET = Refusal("is not supported yet", "drop it")
_NO_CHECKPOINT = Refusal(
    "makes checkpoints from which a run does not resume bit for bit", "drop it"
)
_OWN_LOOP = Refusal("is left to Megatron's own training loop, which RL does not run", "drop it")
_OTHER_MODEL = Refusal("belongs to another model than config.json describes", "drop it")
_OTHER_SHARDS = Refusal("shards weights in a way that the hand-over does not know", "drop it")
_OTHER_SCHEDULE = Refusal("needs a forward step that builds Megatron's schedule plans", "drop it")
_DROPS_TOKENS = Refusal(
    "drops tokens that only Megatron's own training loop computes again", "drop it"
)
_NO_GROUPS = Refusal("leaves ranks without process groups", "drop it")
_DISTILLATION = Refusal("belongs to Megatron's distillation, which RL does not do", "drop it")
_EXITS = "give --exit-signal-handler, or --exit-duration-in-mins"
OWN_RL_REASON = Refusal(
    "belongs to Megatron's own RL loop, which mcore_rl replaces",
    "drop it and use the flags that --help lists under mcore_rl",
)

# Flags of Megatron's own RL loop, which look like ours; refused with any value.
OWN_RL = frozenset(
    """
    perform_rl_step rl_prompts_per_eval grpo_prompts_per_step grpo_group_size rl_generation_lag
    rl_submission_granularity rl_consumption_granularity grpo_iterations grpo_clamp_eps_lower
    grpo_clamp_eps_upper grpo_kl_beta grpo_entropy_term_weight grpo_filter_groups_with_same_reward
    langrl_env_config rl_default_temperature rl_default_top_p rl_default_top_k
    rl_offload_optimizer_during_inference rl_kv_cache_management_mode rl_persist_cuda_graphs
    rl_inference_logprobs_is_correction rl_importance_sampling_truncation_coef
    rl_use_sequence_packing rl_sequence_packing_max_sequences_per_bin rl_sequence_packing_algo
    rl_training_cuda_graphs rl_inference_tensor_model_parallel_size
    rl_inference_pipeline_model_parallel_size rl_inference_expert_model_parallel_size
    rl_inference_expert_tensor_model_parallel_size rl_inference_model_unified_memory_level
    rl_offload_inference_model_weights_when_idle refit_method rl_verify_model_weights_swap
    rl_skip_bos_token rl_profile rl_profile_dir rl_inference_parsers
    """.split()
)

# Flags of that loop with the same meaning here: one flag with two definitions.
SHARED_RL = frozenset({"rl_partial_rollouts"})

# Switches that RL cannot honour: a run would not do what the flag says.
REFUSED: Mapping[str, Refusal] = {
    "calculate_per_token_loss": Refusal("switches on another normalisation of the loss", "drop it"),
    "perform_rl_step": Refusal(
        "switches on Megatron's own RL loop, which mcore_rl replaces", "drop it"
    ),
    "skip_train": Refusal("leaves nothing to do", "to score prompts, run mcore_rl.verify"),
    "freeze_all_layers": Refusal("leaves nothing to learn", "drop it"),
    "yaml_cfg": Refusal("replaces all other flags", "give a file of flags as --rl-config"),
    "train_samples": _COUNTS_STEPS,
    "rampup_batch_size": _COUNTS_STEPS,
    "step_batch_size_schedule": _COUNTS_STEPS,
    "lr_decay_samples": _COUNTS_SAMPLES,
    "lr_warmup_samples": _COUNTS_SAMPLES,
    "lr_wsd_decay_samples": _COUNTS_SAMPLES,
    "iterations_to_skip": _OWN_LOOP,
    "qk_clip": _OWN_LOOP,
    "check_for_large_grads": _OWN_LOOP,
    # Training would draw from no states of its own, and its checkpoints have none.
    "inference_rng_tracker": Refusal(
        "is for Megatron's own inference, and vLLM generates", "drop it"
    ),
    # Completed at the beginning of a step of that loop: weights would be stale.
    "reuse_grad_buf_for_mxfp8_param_ag": _OWN_LOOP,
    "moe_expert_capacity_factor": _NOT_VLLM,
    "moe_input_jitter_eps": _NOT_VLLM,
    "moe_router_force_load_balancing": _NOT_VLLM,
    "moe_router_force_biased": _NOT_VLLM,
    "moe_expert_rank_capacity_factor": _DROPS_TOKENS,
    "moe_paged_stash": _DROPS_TOKENS,
    "use_torch_fsdp2": _NOT_YET,
    "enable_msc": _NOT_YET,
    "non_persistent_ckpt_type": _NOT_YET,
    "no_save_optim": _NO_CHECKPOINT,
    "no_save_rng": _NO_CHECKPOINT,
    "use_checkpoint_args": Refusal(
        "takes flags from a checkpoint", "give them here, or by --rl-config"
    ),
    "ckpt_convert_format": Refusal(
        "converts a checkpoint and ends", "use Megatron's own tools for that"
    ),
    "moe_use_upcycling": _OTHER_MODEL,
    # Needs a sampler of Megatron's, and the loss per token.
    "hybrid_context_parallel": Refusal(
        "distributes samples by a data loader that RL does not have", "drop it"
    ),
    "use_tp_pp_dp_mapping": Refusal(
        "puts stages on other ranks than the hand-over expects", "drop it"
    ),
    "tensor_parallel_num_weight_shards": _OTHER_SHARDS,
    "expert_tensor_parallel_num_weight_shards": _OTHER_SHARDS,
    "overlap_moe_expert_parallel_comm": _OTHER_SCHEDULE,
    "delay_wgrad_compute": _OTHER_SCHEDULE,
    "ep_overlap_early_attn_memory_release": _OTHER_SCHEDULE,
    # Transformer Engine's buffers are made for one shape.
    "tp_comm_overlap": Refusal("needs rows of one length, and those of RL differ", "drop it"),
    "external_cuda_graph": _OWN_LOOP,
    "lazy_mpu_init": _NO_GROUPS,
    "fake_process_group": _NO_GROUPS,
    "logits_save_dir": _DISTILLATION,
    "logits_load_dir": _DISTILLATION,
    "exit_signal_handler_for_training": Refusal("ends a run without saving it", _EXITS),
    "adlr_autoresume": Refusal("is left to Megatron's own training loop", _EXITS),
    "config_logger_dir": Refusal(
        "makes Megatron fail, which cannot write process groups",
        "drop it, all flags and their values are in config.yaml of the run directory",
    ),
    "override_ckpt_iteration": Refusal("gives a checkpoint a wrong step", "drop it"),
    **dict.fromkeys(sorted(OWN_RL - {"perform_rl_step"}), OWN_RL_REASON),
}

# Refused by Megatron's own validation, whose message is passed on.
REFUSED_BY_MEGATRON: Mapping[str, str] = {
    "batch_size": "give --micro-batch-size",
    "warmup": "give --lr-warmup-fraction",
    "model_parallel_size": "give --tensor-model-parallel-size",
    "checkpoint_activations": "give --recompute-activations",
    "encoder_seq_length": "lengths are --rl-max-prompt-tokens and --rl-max-response-tokens",
}

# Derived from our flags; a launch script may repeat the derived value, but no other.
REFUSED_OTHERWISE: Mapping[str, Refusal] = {"train_iters": _COUNTS_STEPS}

# Single values that RL cannot honour, by the names in Megatron.
REFUSED_VALUES: Mapping[str, tuple[tuple[str, ...], Refusal]] = {
    "cuda_graph_impl": (("transformer_engine", "full_iteration"), _OWN_LOOP),
    "transformer_impl": (
        ("inference_optimized",),
        Refusal("builds layers of Megatron's own inference", "give transformer_engine"),
    ),
    "optimizer": (
        ("sgd",),
        Refusal("cannot be saved in Megatron's distributed checkpoints", "give --optimizer adam"),
    ),
    "moe_router_load_balancing_type": (("sinkhorn", "quantile_balancing"), _NOT_VLLM),
    "attention_backend": (
        ("local",),
        Refusal("is read only by Megatron's own model builder", "give --transformer-impl local"),
    ),
}

# Values that Megatron accepts but computes nonsense with, or fails on when a model is built.
RANGES: Mapping[str, str] = {
    "at least 0": """
        lr min_lr lr_warmup_init lr_warmup_iters decoupled_lr decoupled_min_lr weight_decay
        start_weight_decay end_weight_decay clip_grad moe_aux_loss_coeff moe_z_loss_coeff
        moe_router_bias_update_rate mtp_loss_scaling_factor
    """,
    "greater than 0": """
        mtp_num_layers
        adam_eps lr_decay_iters lr_wsd_decay_iters loss_scale initial_loss_scale min_loss_scale
        loss_scale_window hysteresis exit_interval exit_duration_in_mins save_retain_interval
        distributed_timeout_minutes recompute_num_layers ckpt_step
        make_vocab_size_divisible_by num_distributed_optimizer_instances mlp_chunks_for_training
    """,
    "at least 0 and less than 1": """
        adam_beta1 adam_beta2 sgd_momentum muon_momentum lion_beta1 lion_beta2 hidden_dropout
        attention_dropout lr_warmup_fraction
    """,
    "at least 0 and at most 1": """
        optimizer_offload_fraction
    """,
}

# Set by Megatron's validation or given by every launch script: parsed arguments of a fork do not
# show whether a user gave them.
SET_BY_VALIDATION = frozenset(
    """
    async_strategy cuda_graph_scope_deprecated dataloader_type encoder_num_layers encoder_seq_length
    eval_global_batch_size eval_micro_batch_size expert_tensor_parallel_num_weight_shards
    inference_cuda_graph_scope mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype
    mamba_training_ssm_states_dtype max_position_embeddings seq_length split
    tensor_parallel_num_weight_shards
    """.split()
)
