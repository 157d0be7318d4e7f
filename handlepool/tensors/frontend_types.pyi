"""Type the graph of a graph function, `Graph`, and its tensors, `GraphTensor`.

Generated from nvidia-cudnn-frontend 1.32.0 by ``python tests/frontend_types.py``: do not edit. Methods of
`cudnn.pygraph` that plan or launch are left out, since a graph function must not call them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

class GraphTensor(Protocol):
    """A tensor of a graph: an input, an output or an intermediate result."""

    name: str
    data_type: Any
    dim: list[int]
    stride: list[int]
    is_virtual: bool
    is_pass_by_value: bool
    pass_by_value: int | float | None
    uid: int
    uid_assigned: bool
    dim_assigned: bool
    stride_assigned: bool
    reordering_type: Any
    ragged_offset: GraphTensor | None
    ragged_offset_multiplier: int
    alignment_value: int
    scalar_type: Any
    owner: Any

    def set_output(self, value: bool) -> GraphTensor:
        """Mark this tensor as an output (non-virtual) or intermediate (virtual)."""

    def set_data_type(self, dtype: Any) -> GraphTensor:
        """Set the data type."""

    def set_alignment_value(self, value: int) -> GraphTensor:
        """Promise every value this tensor holds is a multiple of `value`."""

    def set_name(self, name: str) -> GraphTensor:
        """Set the tensor name (graph-owned tensors re-index atomically)."""

    def set_dim(self, dim: Sequence[int]) -> GraphTensor:
        """Set the tensor dimensions (user-assigned: pushed at lowering)."""

    def set_stride(self, stride: Sequence[int]) -> GraphTensor:
        """Set the tensor strides (user-assigned: pushed at lowering)."""

    def set_uid(self, uid: int) -> GraphTensor:
        """See the frontend."""

    def set_ragged_offset(self, ragged_offset: GraphTensor) -> GraphTensor:
        """Set the ragged-offset tensor (variable-length layouts)."""

    def set_ragged_offset_multiplier(self, multiplier: int) -> GraphTensor:
        """Set the ragged-offset unit size in tensor elements."""

    def set_reordering_type(self, reordering_type: Any) -> GraphTensor:
        """Set the memory reordering layout (e.g. F8_128x4)."""

    def set_is_pass_by_value(self, value: bool) -> GraphTensor:
        """Mark the tensor as a host pass-by-value scalar."""

    def set_is_virtual(self, value: bool) -> GraphTensor:
        """Set virtualness directly (classic parity; inverse of set_output)."""

    def get_uid(self) -> int:
        """See the frontend."""

    def get_name(self) -> str:
        """See the frontend."""

    def get_dim(self) -> list[int]:
        """See the frontend."""

    def get_stride(self) -> list[int]:
        """See the frontend."""

    def get_data_type(self) -> Any:
        """See the frontend."""

    def get_is_virtual(self) -> bool:
        """See the frontend."""

    def get_is_pass_by_value(self) -> bool:
        """See the frontend."""

    def get_reordering_type(self) -> Any:
        """See the frontend."""

    def get_ragged_offset_multiplier(self) -> int:
        """See the frontend."""

    def validate(self) -> None:
        """Validate tensor configuration."""

class Graph(Protocol):
    """The graph that a graph function builds: the methods of `cudnn.pygraph` that add nodes and tensors."""

    def tensor(
        self,
        dim: Sequence[int],
        stride: Sequence[int] | None = None,
        data_type: Any = None,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: GraphTensor | None = None,
        reordering_type: Any = None,
        name: str = "",
        uid: int | None = None,
        ragged_offset_multiplier: int = 1,
        alignment_value: int = 1,
    ) -> GraphTensor:
        """Create a tensor."""

    def tensor_like(self, template: Any, name: str = "", is_virtual: bool = False) -> GraphTensor:
        """Create tensor from another IR tensor or a DLPack object (e.g. torch)."""

    def tensor_scalar(self, value: float | int, scalar_type: Any, name: str = "") -> GraphTensor:
        """Create a pass-by-value scalar tensor (classic tensor_scalar parity)."""

    def matmul(
        self,
        A: GraphTensor,
        B: GraphTensor,
        compute_data_type: Any = None,
        padding: float = 0.0,
        name: str = "",
    ) -> GraphTensor:
        """Matrix multiplication: C = A @ B."""

    def relu(
        self,
        input: GraphTensor,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """ReLU (optionally leaky via negative_slope, and/or clipped)."""

    def leaky_relu(self, input: GraphTensor, negative_slope: float, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Leaky ReLU."""

    def swish(
        self,
        input: GraphTensor,
        swish_beta: float | None = None,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """Swish / SiLU."""

    def gen_index(self, input: GraphTensor, axis: int, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Generate index along an axis."""

    def relu_backward(
        self,
        loss: GraphTensor,
        input: GraphTensor,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """ReLU backward."""

    def leaky_relu_backward(
        self,
        loss: GraphTensor,
        input: GraphTensor,
        negative_slope: float,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """Leaky ReLU backward."""

    def swish_backward(
        self,
        loss: GraphTensor,
        input: GraphTensor,
        swish_beta: float | None = None,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """Swish backward."""

    @property
    def nodes(self) -> list[Any]:
        """See the frontend."""

    @property
    def tensors(self) -> dict[str, GraphTensor]:
        """All tensors by name (a copy — see nodes)."""

    def find_tensor(self, name_or_uid: str | int) -> GraphTensor | None:
        """Find tensor by name or UID."""

    def get_node(self, name: str) -> Any | None:
        """Find node by name."""

    def get_inputs(self) -> list[GraphTensor]:
        """Get non-virtual input tensors."""

    def get_outputs(self) -> list[GraphTensor]:
        """Get non-virtual output tensors."""

    def abs(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise abs(input)."""

    def ceil(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise ceil(input)."""

    def cos(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise cos(input)."""

    def elu(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise elu(input)."""

    def erf(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise erf(input)."""

    def exp(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise exp(input)."""

    def floor(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise floor(input)."""

    def gelu(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise gelu(input)."""

    def gelu_approx_tanh(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise gelu_approx_tanh(input)."""

    def identity(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise identity(input)."""

    def log(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise log(input)."""

    def logical_not(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise logical_not(input)."""

    def neg(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise neg(input)."""

    def reciprocal(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise reciprocal(input)."""

    def rsqrt(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise rsqrt(input)."""

    def sigmoid(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise sigmoid(input)."""

    def sin(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise sin(input)."""

    def softplus(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise softplus(input)."""

    def sqrt(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise sqrt(input)."""

    def tan(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise tan(input)."""

    def tanh(self, input: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise tanh(input)."""

    def add(self, a: GraphTensor, b: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise add(a, b)."""

    def add_square(self, a: GraphTensor, b: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise add_square(a, b)."""

    def div(self, a: GraphTensor, b: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise div(a, b)."""

    def logical_and(self, a: GraphTensor, b: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise logical_and(a, b)."""

    def logical_or(self, a: GraphTensor, b: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise logical_or(a, b)."""

    def mul(self, a: GraphTensor, b: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise mul(a, b)."""

    def sub(self, a: GraphTensor, b: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise sub(a, b)."""

    def max(self, input0: GraphTensor, input1: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise max(input0, input1)."""

    def min(self, input0: GraphTensor, input1: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise min(input0, input1)."""

    def mod(self, input0: GraphTensor, input1: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise mod(input0, input1)."""

    def pow(self, input0: GraphTensor, input1: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise pow(input0, input1)."""

    def cmp_eq(
        self,
        input: GraphTensor,
        comparison: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """Element-wise cmp_eq(input, comparison)."""

    def cmp_ge(
        self,
        input: GraphTensor,
        comparison: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """Element-wise cmp_ge(input, comparison)."""

    def cmp_gt(
        self,
        input: GraphTensor,
        comparison: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """Element-wise cmp_gt(input, comparison)."""

    def cmp_le(
        self,
        input: GraphTensor,
        comparison: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """Element-wise cmp_le(input, comparison)."""

    def cmp_lt(
        self,
        input: GraphTensor,
        comparison: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """Element-wise cmp_lt(input, comparison)."""

    def cmp_neq(
        self,
        input: GraphTensor,
        comparison: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """Element-wise cmp_neq(input, comparison)."""

    def bias(self, input: GraphTensor, bias: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise bias(input, bias)."""

    def scale(self, input: GraphTensor, scale: GraphTensor, *, name: str = "", compute_data_type: Any = None) -> GraphTensor:
        """Element-wise scale(input, scale)."""

    def elu_backward(
        self,
        loss: GraphTensor,
        input: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """Element-wise elu_backward(loss, input)."""

    def gelu_approx_tanh_backward(
        self,
        loss: GraphTensor,
        input: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """Element-wise gelu_approx_tanh_backward(loss, input)."""

    def gelu_backward(
        self,
        loss: GraphTensor,
        input: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """Element-wise gelu_backward(loss, input)."""

    def sigmoid_backward(
        self,
        loss: GraphTensor,
        input: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """Element-wise sigmoid_backward(loss, input)."""

    def softplus_backward(
        self,
        loss: GraphTensor,
        input: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """Element-wise softplus_backward(loss, input)."""

    def tanh_backward(
        self,
        loss: GraphTensor,
        input: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """Element-wise tanh_backward(loss, input)."""

    def binary_select(
        self,
        input0: GraphTensor,
        input1: GraphTensor,
        mask: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
    ) -> GraphTensor:
        """Element-wise binary_select(input0, input1, mask)."""

    def rmsnorm(
        self,
        input: GraphTensor,
        scale: GraphTensor | None = None,
        bias: GraphTensor | None = None,
        epsilon: GraphTensor | None = None,
        norm_forward_phase: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give Y, inv_var."""

    def rmsnorm_backward(
        self,
        grad: GraphTensor,
        input: GraphTensor,
        scale: GraphTensor | None = None,
        inv_variance: GraphTensor | None = None,
        has_dbias: bool | None = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give DX, DScale, DBias."""

    def layernorm(
        self,
        input: GraphTensor,
        scale: GraphTensor | None = None,
        bias: GraphTensor | None = None,
        epsilon: GraphTensor | None = None,
        norm_forward_phase: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give Y, mean, inv_var."""

    def layernorm_backward(
        self,
        grad: GraphTensor,
        input: GraphTensor,
        scale: GraphTensor | None = None,
        mean: GraphTensor | None = None,
        inv_variance: GraphTensor | None = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give DX, DScale, DBias."""

    def adalayernorm(
        self,
        input: GraphTensor,
        scale: GraphTensor,
        bias: GraphTensor | None = None,
        epsilon: GraphTensor | None = None,
        norm_forward_phase: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give Y, mean, inv_var."""

    def adalayernorm_backward(
        self,
        grad: GraphTensor,
        input: GraphTensor,
        scale: GraphTensor,
        mean: GraphTensor,
        inv_variance: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give DX, DScale, DBias."""

    def instancenorm(
        self,
        input: GraphTensor,
        scale: GraphTensor,
        bias: GraphTensor,
        epsilon: GraphTensor,
        norm_forward_phase: Any,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give Y, mean, inv_var."""

    def instancenorm_backward(
        self,
        grad: GraphTensor,
        input: GraphTensor,
        scale: GraphTensor,
        mean: GraphTensor | None = None,
        inv_variance: GraphTensor | None = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give DX, DScale, DBias."""

    def batchnorm(
        self,
        input: GraphTensor,
        scale: GraphTensor,
        bias: GraphTensor,
        in_running_mean: GraphTensor | None = None,
        in_running_var: GraphTensor | None = None,
        epsilon: GraphTensor | None = None,
        momentum: GraphTensor | None = None,
        *,
        peer_stats: Sequence[GraphTensor] | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give Y, mean, inv_var, next_running_mean, next_running_var."""

    def batchnorm_inference(
        self,
        input: GraphTensor,
        mean: GraphTensor,
        inv_variance: GraphTensor,
        scale: GraphTensor,
        bias: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> GraphTensor:
        """Give Y."""

    def batchnorm_backward(
        self,
        grad: GraphTensor,
        input: GraphTensor,
        scale: GraphTensor,
        mean: GraphTensor,
        inv_variance: GraphTensor,
        *,
        peer_stats: Sequence[GraphTensor] | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give DX, DScale, DBias."""

    def genstats(
        self,
        input: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give SUM, SQ_SUM."""

    def reduction(
        self,
        input: GraphTensor,
        group_offset: GraphTensor | None = None,
        mode: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> GraphTensor:
        """Give OUT_0."""

    def block_scale_dequantize(
        self,
        input: GraphTensor,
        descale: GraphTensor,
        block_size: Sequence[int],
        is_negative_scale: bool | None = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> GraphTensor:
        """Give OUT_0."""

    def block_scale_quantize(
        self,
        input: GraphTensor,
        group_offset: GraphTensor | None = None,
        block_size: int | None = None,
        axis: int | None = None,
        transpose: bool | None = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give Y, scale."""

    def moe_grouped_matmul(
        self,
        token: GraphTensor,
        weight: GraphTensor,
        first_token_offset: GraphTensor,
        token_index: GraphTensor | None = None,
        token_ks: GraphTensor | None = None,
        mode: Any = None,
        top_k: int | None = None,
        *,
        top_k_scores: GraphTensor | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> GraphTensor:
        """Give OUT_0."""

    def moe_grouped_matmul_bwd(
        self,
        doutput: GraphTensor,
        token: GraphTensor,
        first_token_offset: GraphTensor,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> GraphTensor:
        """Give dweight."""

    def gdn(
        self,
        q: GraphTensor | None = None,
        k: GraphTensor | None = None,
        v: GraphTensor | None = None,
        g: GraphTensor | None = None,
        beta: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        initial_state: GraphTensor | None = None,
        a_log: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        state_indices: GraphTensor | None = None,
        scale: Any = None,
        output_final_state: Any = None,
        use_qk_l2norm: Any = None,
        checkpoint_every_n_tokens: Any = None,
        use_beta_sigmoid: Any = None,
        allow_neg_eigval: Any = None,
        safe_gate: Any = None,
        gate_domain: Any = None,
        batch_invariant: Any = None,
        overwrite_initial_state: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give O, final_state, state_checkpoints."""

    def gdn_bwd(
        self,
        q: GraphTensor | None = None,
        k: GraphTensor | None = None,
        v: GraphTensor | None = None,
        g: GraphTensor | None = None,
        beta: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        dO: GraphTensor | None = None,
        state_checkpoints: GraphTensor | None = None,
        initial_state: GraphTensor | None = None,
        d_final_state: GraphTensor | None = None,
        a_log: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        scale: Any = None,
        use_qk_l2norm: Any = None,
        checkpoint_every_n_tokens: Any = None,
        use_beta_sigmoid: Any = None,
        allow_neg_eigval: Any = None,
        safe_gate: Any = None,
        gate_domain: Any = None,
        batch_invariant: Any = None,
        overwrite_initial_state: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give dQ, dK, dV, dG, dBeta, d_initial_state, d_a_log, d_dt_bias."""

    def gdn_summary(
        self,
        k: GraphTensor | None = None,
        v: GraphTensor | None = None,
        g: GraphTensor | None = None,
        beta: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        initial_state: GraphTensor | None = None,
        a_log: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        output_transition: Any = None,
        use_qk_l2norm: Any = None,
        use_beta_sigmoid: Any = None,
        allow_neg_eigval: Any = None,
        safe_gate: Any = None,
        gate_domain: Any = None,
        batch_invariant: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give final_state, transition."""

    def gdn_summary_bwd(
        self,
        q: GraphTensor | None = None,
        k: GraphTensor | None = None,
        g: GraphTensor | None = None,
        beta: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        dO: GraphTensor | None = None,
        d_final_state: GraphTensor | None = None,
        a_log: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        output_transition: Any = None,
        scale: Any = None,
        use_qk_l2norm: Any = None,
        use_beta_sigmoid: Any = None,
        allow_neg_eigval: Any = None,
        safe_gate: Any = None,
        gate_domain: Any = None,
        batch_invariant: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give d_initial_state, transition."""

    def mamba2(
        self,
        q: GraphTensor | None = None,
        k: GraphTensor | None = None,
        v: GraphTensor | None = None,
        g: GraphTensor | None = None,
        a: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        initial_state: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        d: GraphTensor | None = None,
        z: GraphTensor | None = None,
        state_indices: GraphTensor | None = None,
        output_final_state: Any = None,
        checkpoint_every_n_tokens: Any = None,
        dt_softplus: Any = None,
        dt_min: Any = None,
        dt_max: Any = None,
        output_pre_gate: Any = None,
        batch_invariant: Any = None,
        overwrite_initial_state: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give O, final_state, state_checkpoints, O_pre."""

    def mamba2_bwd(
        self,
        q: GraphTensor | None = None,
        k: GraphTensor | None = None,
        v: GraphTensor | None = None,
        g: GraphTensor | None = None,
        a: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        dO: GraphTensor | None = None,
        state_checkpoints: GraphTensor | None = None,
        initial_state: GraphTensor | None = None,
        d_final_state: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        d: GraphTensor | None = None,
        z: GraphTensor | None = None,
        O_pre: GraphTensor | None = None,
        checkpoint_every_n_tokens: Any = None,
        dt_softplus: Any = None,
        dt_min: Any = None,
        dt_max: Any = None,
        batch_invariant: Any = None,
        overwrite_initial_state: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give dQ, dK, dV, dG, dA, d_initial_state, d_dt_bias, dD, dZ."""

    def mamba2_summary(
        self,
        k: GraphTensor | None = None,
        v: GraphTensor | None = None,
        g: GraphTensor | None = None,
        a: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        initial_state: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        output_transition: Any = None,
        dt_softplus: Any = None,
        dt_min: Any = None,
        dt_max: Any = None,
        batch_invariant: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give final_state, transition."""

    def mamba2_summary_bwd(
        self,
        q: GraphTensor | None = None,
        k: GraphTensor | None = None,
        g: GraphTensor | None = None,
        a: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        dO: GraphTensor | None = None,
        d_final_state: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        output_transition: Any = None,
        dt_softplus: Any = None,
        dt_min: Any = None,
        dt_max: Any = None,
        batch_invariant: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give d_initial_state, transition."""

    def gdp(
        self,
        q: GraphTensor | None = None,
        k: GraphTensor | None = None,
        v: GraphTensor | None = None,
        g: GraphTensor | None = None,
        beta: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        initial_state: GraphTensor | None = None,
        a_log: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        state_indices: GraphTensor | None = None,
        num_householder: Any = None,
        scale: Any = None,
        output_final_state: Any = None,
        use_qk_l2norm: Any = None,
        checkpoint_every_n_tokens: Any = None,
        use_beta_sigmoid: Any = None,
        allow_neg_eigval: Any = None,
        safe_gate: Any = None,
        gate_domain: Any = None,
        batch_invariant: Any = None,
        overwrite_initial_state: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give O, final_state, state_checkpoints."""

    def gdp_bwd(
        self,
        q: GraphTensor | None = None,
        k: GraphTensor | None = None,
        v: GraphTensor | None = None,
        g: GraphTensor | None = None,
        beta: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        dO: GraphTensor | None = None,
        state_checkpoints: GraphTensor | None = None,
        initial_state: GraphTensor | None = None,
        d_final_state: GraphTensor | None = None,
        a_log: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        num_householder: Any = None,
        scale: Any = None,
        use_qk_l2norm: Any = None,
        checkpoint_every_n_tokens: Any = None,
        use_beta_sigmoid: Any = None,
        allow_neg_eigval: Any = None,
        safe_gate: Any = None,
        gate_domain: Any = None,
        batch_invariant: Any = None,
        overwrite_initial_state: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give dQ, dK, dV, dG, dBeta, d_initial_state, d_a_log, d_dt_bias."""

    def gdp_summary(
        self,
        k: GraphTensor | None = None,
        v: GraphTensor | None = None,
        g: GraphTensor | None = None,
        beta: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        initial_state: GraphTensor | None = None,
        a_log: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        num_householder: Any = None,
        output_transition: Any = None,
        use_qk_l2norm: Any = None,
        use_beta_sigmoid: Any = None,
        allow_neg_eigval: Any = None,
        safe_gate: Any = None,
        gate_domain: Any = None,
        batch_invariant: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give final_state, transition."""

    def gdp_summary_bwd(
        self,
        q: GraphTensor | None = None,
        k: GraphTensor | None = None,
        g: GraphTensor | None = None,
        beta: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        dO: GraphTensor | None = None,
        d_final_state: GraphTensor | None = None,
        a_log: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        num_householder: Any = None,
        output_transition: Any = None,
        scale: Any = None,
        use_qk_l2norm: Any = None,
        use_beta_sigmoid: Any = None,
        allow_neg_eigval: Any = None,
        safe_gate: Any = None,
        gate_domain: Any = None,
        batch_invariant: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give d_initial_state, transition."""

    def kda(
        self,
        q: GraphTensor | None = None,
        k: GraphTensor | None = None,
        v: GraphTensor | None = None,
        g: GraphTensor | None = None,
        beta: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        initial_state: GraphTensor | None = None,
        a_log: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        state_indices: GraphTensor | None = None,
        scale: Any = None,
        output_final_state: Any = None,
        use_qk_l2norm: Any = None,
        checkpoint_every_n_tokens: Any = None,
        use_beta_sigmoid: Any = None,
        allow_neg_eigval: Any = None,
        safe_gate: Any = None,
        gate_domain: Any = None,
        gate_lower_bound: Any = None,
        batch_invariant: Any = None,
        overwrite_initial_state: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give O, final_state, state_checkpoints."""

    def kda_bwd(
        self,
        q: GraphTensor | None = None,
        k: GraphTensor | None = None,
        v: GraphTensor | None = None,
        g: GraphTensor | None = None,
        beta: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        dO: GraphTensor | None = None,
        state_checkpoints: GraphTensor | None = None,
        initial_state: GraphTensor | None = None,
        d_final_state: GraphTensor | None = None,
        a_log: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        scale: Any = None,
        use_qk_l2norm: Any = None,
        checkpoint_every_n_tokens: Any = None,
        use_beta_sigmoid: Any = None,
        allow_neg_eigval: Any = None,
        safe_gate: Any = None,
        gate_domain: Any = None,
        gate_lower_bound: Any = None,
        batch_invariant: Any = None,
        overwrite_initial_state: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give dQ, dK, dV, dG, dBeta, d_initial_state, d_a_log, d_dt_bias."""

    def kda_summary(
        self,
        k: GraphTensor | None = None,
        v: GraphTensor | None = None,
        g: GraphTensor | None = None,
        beta: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        initial_state: GraphTensor | None = None,
        a_log: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        output_transition: Any = None,
        use_qk_l2norm: Any = None,
        use_beta_sigmoid: Any = None,
        allow_neg_eigval: Any = None,
        safe_gate: Any = None,
        gate_domain: Any = None,
        gate_lower_bound: Any = None,
        batch_invariant: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give final_state, transition."""

    def kda_summary_bwd(
        self,
        q: GraphTensor | None = None,
        k: GraphTensor | None = None,
        g: GraphTensor | None = None,
        beta: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        dO: GraphTensor | None = None,
        d_final_state: GraphTensor | None = None,
        a_log: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        output_transition: Any = None,
        scale: Any = None,
        use_qk_l2norm: Any = None,
        use_beta_sigmoid: Any = None,
        allow_neg_eigval: Any = None,
        safe_gate: Any = None,
        gate_domain: Any = None,
        gate_lower_bound: Any = None,
        batch_invariant: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give d_initial_state, transition."""

    def gdn2(
        self,
        q: GraphTensor | None = None,
        k: GraphTensor | None = None,
        v: GraphTensor | None = None,
        g: GraphTensor | None = None,
        beta: GraphTensor | None = None,
        w: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        initial_state: GraphTensor | None = None,
        a_log: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        state_indices: GraphTensor | None = None,
        scale: Any = None,
        output_final_state: Any = None,
        use_qk_l2norm: Any = None,
        checkpoint_every_n_tokens: Any = None,
        use_beta_sigmoid: Any = None,
        allow_neg_eigval: Any = None,
        beta_guard: Any = None,
        safe_gate: Any = None,
        gate_domain: Any = None,
        gate_lower_bound: Any = None,
        batch_invariant: Any = None,
        overwrite_initial_state: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give O, final_state, state_checkpoints."""

    def gdn2_bwd(
        self,
        q: GraphTensor | None = None,
        k: GraphTensor | None = None,
        v: GraphTensor | None = None,
        g: GraphTensor | None = None,
        beta: GraphTensor | None = None,
        w: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        dO: GraphTensor | None = None,
        state_checkpoints: GraphTensor | None = None,
        initial_state: GraphTensor | None = None,
        d_final_state: GraphTensor | None = None,
        a_log: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        scale: Any = None,
        use_qk_l2norm: Any = None,
        checkpoint_every_n_tokens: Any = None,
        use_beta_sigmoid: Any = None,
        allow_neg_eigval: Any = None,
        beta_guard: Any = None,
        safe_gate: Any = None,
        gate_domain: Any = None,
        gate_lower_bound: Any = None,
        batch_invariant: Any = None,
        overwrite_initial_state: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give dQ, dK, dV, dG, dBeta, dW, d_initial_state, d_a_log, d_dt_bias."""

    def gdn2_summary(
        self,
        k: GraphTensor | None = None,
        v: GraphTensor | None = None,
        g: GraphTensor | None = None,
        beta: GraphTensor | None = None,
        w: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        initial_state: GraphTensor | None = None,
        a_log: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        output_transition: Any = None,
        use_qk_l2norm: Any = None,
        use_beta_sigmoid: Any = None,
        allow_neg_eigval: Any = None,
        beta_guard: Any = None,
        safe_gate: Any = None,
        gate_domain: Any = None,
        gate_lower_bound: Any = None,
        batch_invariant: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give final_state, transition."""

    def gdn2_summary_bwd(
        self,
        q: GraphTensor | None = None,
        k: GraphTensor | None = None,
        g: GraphTensor | None = None,
        beta: GraphTensor | None = None,
        cu_seqlens: GraphTensor | None = None,
        dO: GraphTensor | None = None,
        d_final_state: GraphTensor | None = None,
        a_log: GraphTensor | None = None,
        dt_bias: GraphTensor | None = None,
        output_transition: Any = None,
        scale: Any = None,
        use_qk_l2norm: Any = None,
        use_beta_sigmoid: Any = None,
        allow_neg_eigval: Any = None,
        beta_guard: Any = None,
        safe_gate: Any = None,
        gate_domain: Any = None,
        gate_lower_bound: Any = None,
        batch_invariant: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give d_initial_state, transition."""

    def conv_fprop(
        self,
        image: GraphTensor,
        weight: GraphTensor,
        padding: Sequence[int] | None = None,
        pre_padding: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        convolution_mode: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> GraphTensor:
        """Give Y."""

    def conv_dgrad(
        self,
        loss: GraphTensor,
        filter: GraphTensor,
        padding: Sequence[int] | None = None,
        pre_padding: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        convolution_mode: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> GraphTensor:
        """Give DX."""

    def conv_wgrad(
        self,
        image: GraphTensor,
        loss: GraphTensor,
        padding: Sequence[int] | None = None,
        pre_padding: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        convolution_mode: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> GraphTensor:
        """Give DW."""

    def reshape(
        self,
        input: GraphTensor,
        reshape_mode: Any = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> GraphTensor:
        """Give OUT_0."""

    def slice(
        self,
        input: GraphTensor,
        slices: Sequence[Any] | None = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> GraphTensor:
        """Give OUT_0."""

    def transpose(
        self,
        input: GraphTensor,
        permutation: Sequence[int],
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> GraphTensor:
        """Give OUT_0."""

    def concatenate(
        self,
        axis: int,
        in_place_index: int | None = None,
        *,
        inputs: Sequence[GraphTensor] | None = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> GraphTensor:
        """Give OUT_0."""

    def rope(
        self,
        input: GraphTensor,
        freqs: GraphTensor,
        output_scale: float | None = None,
        rope_dim: int | None = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> GraphTensor:
        """Give OUT_0."""

    def rope_backward(
        self,
        dY: GraphTensor,
        freqs: GraphTensor,
        output_scale: float | None = None,
        rope_dim: int | None = None,
        *,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> GraphTensor:
        """Give OUT_0."""

    def sdpa(
        self,
        q: GraphTensor,
        k: GraphTensor,
        v: GraphTensor,
        *,
        is_inference: Any | None = None,
        attn_scale: Any | None = None,
        bias: GraphTensor | None = None,
        block_mask: GraphTensor | None = None,
        use_alibi_mask: bool | None = None,
        use_padding_mask: bool | None = None,
        seq_len_q: GraphTensor | None = None,
        seq_len_kv: GraphTensor | None = None,
        use_causal_mask: bool | None = None,
        use_causal_mask_bottom_right: bool | None = None,
        sliding_window_length: Any | None = None,
        diagonal_alignment: Any = None,
        diagonal_band_left_bound: Any | None = None,
        diagonal_band_right_bound: Any | None = None,
        dropout: Any | None = None,
        rng_dump: GraphTensor | None = None,
        paged_attention_k_table: GraphTensor | None = None,
        paged_attention_v_table: GraphTensor | None = None,
        paged_attention_max_seq_len_kv: Any | None = None,
        max_total_seq_len_q: Any | None = None,
        max_total_seq_len_kv: Any | None = None,
        score_mod: Any | None = None,
        generate_stats: Any | None = None,
        implementation: Any = None,
        score_max: GraphTensor | None = None,
        score_sum_exp: GraphTensor | None = None,
        sink_token: GraphTensor | None = None,
        unfuse_fma: bool | None = None,
        cu_seq_len_q: GraphTensor | None = None,
        cu_seq_len_kv: GraphTensor | None = None,
        stats_use_log2: bool | None = None,
        kv_mask: GraphTensor | None = None,
        softmax_precision: Any = None,
        attn_scale_prefolded: Any = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give O, Stats."""

    def sdpa_backward(
        self,
        q: GraphTensor,
        k: GraphTensor,
        v: GraphTensor,
        o: GraphTensor,
        dO: GraphTensor,
        stats: GraphTensor,
        *,
        attn_scale: Any | None = None,
        bias: GraphTensor | None = None,
        dBias: GraphTensor | None = None,
        use_alibi_mask: bool | None = None,
        use_padding_mask: bool | None = None,
        seq_len_q: GraphTensor | None = None,
        seq_len_kv: GraphTensor | None = None,
        max_total_seq_len_q: Any | None = None,
        max_total_seq_len_kv: Any | None = None,
        use_causal_mask: bool | None = None,
        use_causal_mask_bottom_right: bool | None = None,
        sliding_window_length: Any | None = None,
        diagonal_alignment: Any = None,
        diagonal_band_left_bound: Any | None = None,
        diagonal_band_right_bound: Any | None = None,
        dropout: Any | None = None,
        rng_dump: GraphTensor | None = None,
        use_deterministic_algorithm: bool | None = None,
        score_mod: Any | None = None,
        score_mod_bprop: Any | None = None,
        sink_token: GraphTensor | None = None,
        dSink_token: GraphTensor | None = None,
        softmax_precision: Any = None,
        attn_scale_prefolded: Any = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give dQ, dK, dV."""

    def sdpa_fp8(
        self,
        q: GraphTensor,
        k: GraphTensor,
        v: GraphTensor,
        descale_q: GraphTensor,
        descale_k: GraphTensor,
        descale_v: GraphTensor,
        descale_s: GraphTensor,
        scale_s: GraphTensor,
        scale_o: GraphTensor,
        *,
        is_inference: Any | None = None,
        attn_scale: Any | None = None,
        bias: GraphTensor | None = None,
        use_alibi_mask: bool | None = None,
        use_padding_mask: bool | None = None,
        seq_len_q: GraphTensor | None = None,
        seq_len_kv: GraphTensor | None = None,
        use_causal_mask: bool | None = None,
        use_causal_mask_bottom_right: bool | None = None,
        sliding_window: Any | None = None,
        diagonal_alignment: Any = None,
        left_bound: Any | None = None,
        right_bound: Any | None = None,
        dropout: Any | None = None,
        rng_dump: GraphTensor | None = None,
        paged_attention_k_table: GraphTensor | None = None,
        paged_attention_v_table: GraphTensor | None = None,
        paged_attention_max_seq_len_kv: Any | None = None,
        max_total_seq_len_q: Any | None = None,
        max_total_seq_len_kv: Any | None = None,
        fn: Any | None = None,
        generate_stats: Any | None = None,
        score_max: GraphTensor | None = None,
        score_sum_exp: GraphTensor | None = None,
        sink_token: GraphTensor | None = None,
        unfuse_fma: bool | None = None,
        implementation: Any = None,
        cu_seq_len_q: GraphTensor | None = None,
        cu_seq_len_kv: GraphTensor | None = None,
        stats_use_log2: bool | None = None,
        sf_o: GraphTensor | None = None,
        softmax_precision: Any = None,
        attn_scale_prefolded: Any = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give O, Stats, Amax_S, Amax_O."""

    def sdpa_fp8_backward(
        self,
        q: GraphTensor,
        k: GraphTensor,
        v: GraphTensor,
        o: GraphTensor,
        dO: GraphTensor,
        stats: GraphTensor,
        descale_q: GraphTensor,
        descale_k: GraphTensor,
        descale_v: GraphTensor,
        descale_o: GraphTensor,
        descale_dO: GraphTensor,
        descale_s: GraphTensor,
        descale_dP: GraphTensor,
        scale_s: GraphTensor,
        scale_dQ: GraphTensor,
        scale_dK: GraphTensor,
        scale_dV: GraphTensor,
        scale_dP: GraphTensor,
        *,
        attn_scale: Any | None = None,
        use_padding_mask: bool | None = None,
        seq_len_q: GraphTensor | None = None,
        seq_len_kv: GraphTensor | None = None,
        use_causal_mask: bool | None = None,
        use_causal_mask_bottom_right: bool | None = None,
        diagonal_alignment: Any = None,
        left_bound: Any | None = None,
        right_bound: Any | None = None,
        use_deterministic_algorithm: bool | None = None,
        dropout: Any | None = None,
        sink_token: GraphTensor | None = None,
        dSink_token: GraphTensor | None = None,
        max_total_seq_len_q: Any | None = None,
        max_total_seq_len_kv: Any | None = None,
        softmax_precision: Any = None,
        attn_scale_prefolded: Any = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give dQ, dK, dV, amax_dQ, amax_dK, amax_dV, amax_dP."""

    def sdpa_mxfp8(
        self,
        q: GraphTensor,
        k: GraphTensor,
        v: GraphTensor,
        descale_q: GraphTensor,
        descale_k: GraphTensor,
        descale_v: GraphTensor,
        *,
        attn_scale: Any | None = None,
        use_causal_mask: bool | None = None,
        use_causal_mask_bottom_right: bool | None = None,
        diagonal_alignment: Any = None,
        diagonal_band_left_bound: Any | None = None,
        diagonal_band_right_bound: Any | None = None,
        generate_stats: Any = None,
        sink_token: GraphTensor | None = None,
        unfuse_fma: bool | None = None,
        implementation: Any = None,
        use_padding_mask: bool | None = None,
        seq_len_q: GraphTensor | None = None,
        seq_len_kv: GraphTensor | None = None,
        max_total_seq_len_q: Any | None = None,
        max_total_seq_len_kv: Any | None = None,
        cu_seq_len_q: GraphTensor | None = None,
        cu_seq_len_kv: GraphTensor | None = None,
        paged_attention_k_table: GraphTensor | None = None,
        paged_attention_v_table: GraphTensor | None = None,
        paged_attention_max_seq_len_kv: Any | None = None,
        sf_o: GraphTensor | None = None,
        scale_o: GraphTensor | None = None,
        softmax_precision: Any = None,
        attn_scale_prefolded: Any = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give O, Stats, Amax_O."""

    def sdpa_mxfp8_backward(
        self,
        q: GraphTensor,
        q_T: GraphTensor,
        k: GraphTensor,
        k_T: GraphTensor,
        v: GraphTensor,
        o_f16: GraphTensor,
        dO_f16: GraphTensor,
        dO: GraphTensor,
        dO_T: GraphTensor,
        stats: GraphTensor,
        descale_q: GraphTensor,
        descale_q_T: GraphTensor,
        descale_k: GraphTensor,
        descale_k_T: GraphTensor,
        descale_v: GraphTensor,
        descale_dO: GraphTensor,
        descale_dO_T: GraphTensor,
        *,
        attn_scale: Any | None = None,
        use_padding_mask: bool | None = None,
        seq_len_q: GraphTensor | None = None,
        seq_len_kv: GraphTensor | None = None,
        use_causal_mask: bool | None = None,
        use_causal_mask_bottom_right: bool | None = None,
        diagonal_alignment: Any = None,
        left_bound: Any | None = None,
        right_bound: Any | None = None,
        use_deterministic_algorithm: bool | None = None,
        dropout: Any | None = None,
        sink_token: GraphTensor | None = None,
        dSink_token: GraphTensor | None = None,
        max_total_seq_len_q: Any | None = None,
        max_total_seq_len_kv: Any | None = None,
        softmax_precision: Any = None,
        attn_scale_prefolded: Any = None,
        name: str = "",
        compute_data_type: Any = None,
        out_dims: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    ) -> list[GraphTensor]:
        """Give dQ, dK, dV, amax_dQ, amax_dK, amax_dV."""
