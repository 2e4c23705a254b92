"""What a block's graph allows, without processes: degrees, collectives by hand count, shapes, refusals."""

import copy

import pytest
import torch
from torch import nn

from autopar.errors import InputError, RunError
from autopar.runtime.tensor_parallel import apply, derive
from autopar.runtime.tensor_parallel.collectives import Team, _all_gather, _reduce_scatter


def test_heads_and_width_limit_the_degrees(blocks):
    block, args, kwargs = blocks.llama(kv_heads=2, heads=14, hidden=224, width=1792, device="meta")
    derivation = derive(block, args, kwargs)
    assert derivation.degrees(64) == (2, 7, 14)
    assert derivation.reason == "heads 14 (kv 2 x 7), width 1792"
    with pytest.raises(InputError, match="an axis of 2 does not divide"):
        derivation.plan((2, 2))
    assert derivation.plan((7,)).local_shapes["self_attn.k_proj.weight"] == (32, 224)


def test_more_ranks_than_kv_heads_replicate_keys_and_values(blocks):
    block, args, kwargs = blocks.make("llama_kv2")
    derivation = derive(block, args, kwargs)
    assert derivation.degrees(16) == (2, 4)
    shapes = derivation.plan((2, 2)).local_shapes
    assert shapes["self_attn.q_proj.weight"] == (16, 64)
    assert shapes["self_attn.k_proj.weight"] == (16, 64)
    assert shapes["mlp.down_proj.weight"] == (64, 24)


def test_calls_of_a_llama_block_by_hand(blocks):
    block, args, kwargs = blocks.make("llama")
    derivation, activation = derive(block, args, kwargs), blocks.SEQUENCE * 64 * 4
    calls = [(c.collective, c.phase, c.size_bytes.at(3)) for c in derivation.plan((2,)).calls]
    assert calls == [("all_reduce", phase, 3 * activation) for phase in ("forward", "forward", "backward", "backward")]
    calls = derivation.plan((2,), sequence_norms=True).calls
    assert [(c.collective, c.size_bytes.at(3)) for c in calls if c.phase == "forward"] == [
        ("all_gather", 3 * activation),
        ("reduce_scatter", 3 * activation),
    ] * 2
    backward = [(c.collective, c.size_bytes.at(3)) for c in calls if c.phase == "backward"]
    weights = [("all_reduce", 64 * 4)] * 2
    assert sorted(backward) == sorted(
        [("all_gather", 3 * activation), ("reduce_scatter", 3 * activation)] * 2 + weights
    )


@pytest.mark.parametrize("name", ["llama_kv2", "gpt2", "nano"])
def test_the_plan_does_not_depend_on_batch_and_sequence(blocks, name):
    block, args, kwargs = blocks.make(name)
    short = [x[:1, :4] for x in args]
    if "position_embeddings" in kwargs:
        kwargs_short = {**kwargs, "position_embeddings": tuple(x[:, :4] for x in kwargs["position_embeddings"])}
    else:
        kwargs_short = kwargs
    plans = [derive(block, tuple(a), k).plan((2,)) for a, k in ((args, kwargs), (short, kwargs_short))]
    assert plans[0].layouts == plans[1].layouts


def test_deriving_does_not_touch_the_block(blocks):
    block, args, kwargs = blocks.make("nano")
    before = {name: (id(p), p.clone()) for name, p in block.named_parameters()}
    called = []
    block.register_forward_hook(lambda *_: called.append(1))
    block.register_forward_pre_hook(lambda *_: called.append(1))
    derive(block, args, kwargs).plan((2,))
    assert not called
    for name, p in block.named_parameters():
        assert id(p) == before[name][0]
        assert torch.equal(p, before[name][1])
        assert p.grad is None


def test_a_norm_over_the_sharded_width_is_refused(blocks):
    derivation = derive(blocks.FullNorm(), (torch.randn(2, 4, blocks.HIDDEN),), {})
    assert derivation.degrees(16) == ()
    with pytest.raises(InputError):
        derivation.plan((2,))


class Mystery(nn.Module):
    """An MLP with an operator in its middle that has no rule."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.b(torch.renorm(self.a(x), 2, 0, 1.0))


def test_an_unknown_operator_blocks(blocks):
    derivation = derive(Mystery(), (torch.randn(2, 4, 16),), {})
    assert derivation.graph.unknown["renorm"] == 1
    assert derivation.degrees(8) == ()


def test_data_dependent_control_flow_is_refused_with_a_reason():
    class Branch(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(InputError, match="cannot trace Branch"):
        derive(Branch(), (torch.randn(2, 4, 16),), {})


def test_sequence_norms_refuse_a_sequence_that_does_not_divide(blocks):
    block, args, kwargs = blocks.nano(heads=4, sequence=7)
    derivation = derive(block, args, kwargs)
    assert derivation.why_no_sequence_norms((2,)) == "2 ranks do not divide the sequence of 7"
    assert derivation.plan((2,)).tp == 2


def test_without_groups_the_local_shapes_are_those_of_a_rank(blocks):
    block, args, kwargs = blocks.make("nano")
    names = list(block.state_dict())
    block.ln_1.weight.requires_grad_(False)
    plan = derive(block, args, kwargs).plan((2, 2), sequence_norms=True)
    apply(block, plan, None, (0, 1))
    calls = []
    block.register_forward_hook(lambda *_: calls.append(1))
    x = args[0][:, : blocks.SEQUENCE // 4].clone().requires_grad_()
    out = block(x)
    out.sum().backward()
    assert out.shape == x.shape == x.grad.shape
    assert calls == [1]
    assert list(block.state_dict()) == names
    assert not block.ln_1.weight.requires_grad
    assert block.fc.weight.grad.shape == (24, 48)
    with pytest.raises(ValueError, match="already"):
        apply(block, plan, None, (0, 1))


class Masked(nn.Module):
    """Keyword inputs of which the activation is not the first given."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden_states, mask=None, scale=1.0, unused=None):
        return hidden_states + self.b(torch.relu(self.a(hidden_states))) * mask * scale, mask.sum()


def test_the_order_of_keyword_inputs_does_not_matter():
    torch.manual_seed(0)
    block, x, mask = Masked(), torch.randn(2, 4, 16), torch.rand(2, 4, 1)
    kwargs = {"unused": None, "scale": 2.0, "mask": mask, "hidden_states": x}
    expected = block(**kwargs)
    plan = derive(block, (), kwargs).plan((2,))
    rebuilt = copy.deepcopy(block)
    apply(block, plan, None, (0,))
    out, total = block(mask=mask, scale=2.0, hidden_states=x, unused=None)
    other = block(x, mask, unused=None, scale=2.0)
    assert torch.equal(out, other[0])
    assert torch.equal(total, expected[1])
    local = rebuilt.b.weight[:, :16] @ torch.relu(x @ rebuilt.a.weight[:16].T + rebuilt.a.bias[:16])[..., None]
    assert torch.allclose(out, x + (local[..., 0] + rebuilt.b.bias / 2) * mask * 2.0, atol=1e-5)


def test_a_plan_that_changes_with_the_inputs_is_an_error(blocks):
    block, args, kwargs = blocks.make("nano")
    plan = derive(block, args, kwargs).plan((2,))
    other = copy.copy(plan)
    object.__setattr__(other, "layouts", dict.fromkeys(plan.layouts, ()) | {"fc.weight": plan.layouts["fc.weight"]})
    apply(block, other, None, (0,))
    with pytest.raises(RunError, match="does not hold for these inputs"):
        block(*args)


def test_gather_and_scatter_shapes_without_groups():
    team, x = Team(2, 1), torch.arange(12.0).view(3, 4)
    assert _all_gather(x, team, [3, 8], 3).shape == (3, 8)
    assert torch.equal(_reduce_scatter(x, team, [3, 2], 3), x[:, 2:])
