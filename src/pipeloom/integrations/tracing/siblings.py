"""Join products of one tensor into one, as fused trainers do: queries, keys and values; a gate and its factor."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipeloom.spec.traced import AttentionOperator, Counts, KernelOperator, Operator, ProductOperator, reads_of


def join_siblings(
    num_inputs: int, operators: Sequence[Operator], result: int | None
) -> tuple[list[Operator], int | None]:
    """Return the operators with products of one tensor joined where an attention or one kernel reads all of them.

    Norms and rotations of queries and keys become one kernel each, which reads and writes the joined tensor.
    """
    graph = _Graph(num_inputs, list(operators))
    for i, operator in enumerate(operators):
        if isinstance(operator, AttentionOperator):
            graph.join_attention(i)
        elif isinstance(operator, KernelOperator) and len(operator.reads) == 2 and not operator.passes:
            graph.join_gate(i)
    return graph.renumbered(result)


class _Graph:
    def __init__(self, num_inputs: int, operators: list[Operator]) -> None:
        self.num_inputs, self.operators = num_inputs, operators
        self.gone: dict[int, int] = {}
        """Tensors that became part of another."""
        self.order: list[int] = list(range(len(operators)))

    def producer(self, tensor: int) -> Operator | None:
        return self.operators[tensor - self.num_inputs] if tensor >= self.num_inputs else None

    def readers(self, tensor: int) -> int:
        return sum(tensor in reads_of(o) for i, o in enumerate(self.operators) if self.num_inputs + i not in self.gone)

    def chain(self, tensor: int) -> tuple[list[int], int] | None:
        """Return the kernels from a product to a tensor, and the product's tensor."""
        kernels: list[int] = []
        while True:
            operator = self.producer(tensor)
            if isinstance(operator, ProductOperator):
                return kernels[::-1], tensor
            if not isinstance(operator, KernelOperator) or len(operator.reads) != 1 or self.readers(tensor) > 1:
                return None
            kernels.append(tensor)
            tensor = operator.reads[0]

    def join_attention(self, number: int) -> None:
        """Join the products that an attention's queries, keys and values come from."""
        attention = self.operators[number]
        assert isinstance(attention, AttentionOperator)
        if len(attention.reads) < 2:
            return
        chains = [self.chain(read) for read in attention.reads]
        if any(each is None for each in chains):
            return
        known = [each for each in chains if each is not None]
        products = list(dict.fromkeys(tensor for _, tensor in known))
        if not self.can_join(products):
            return
        if len(products) > 1 and any(self.readers(t) > 1 for t in products):
            return  # such as a gate in the columns of the queries, which alone would be kept
        longest = max((kernels for kernels, _ in known), key=len)
        kinds = [self._kernel(t).kind for t in longest]
        steps: list[list[int]] = [[] for _ in kinds]
        for kernels, _ in known:
            at = 0
            for tensor in kernels:
                kind = self._kernel(tensor).kind
                while at < len(kinds) and kinds[at] != kind:
                    at += 1
                if at == len(kinds):
                    return
                steps[at].append(tensor)
                at += 1
        before = self.join_products(products)
        self.group_heads(attention, before)
        width = self._product(before).out_width
        for step in steps:
            before = self.join_kernels(step, before, width)
        kept = attention.eager_bytes
        if len(products) == 1 and steps and any(not kernels for kernels, _ in known):
            # The values are a view of the whole product, which eager PyTorch keeps beside the rotated parts.
            values = attention.key_value_width * attention.value_width
            values //= attention.query_key_width + attention.value_width
            kept = times(attention.rows, 2.0 * (width - values))
        self.operators[number] = msgspec.structs.replace(attention, reads=(before,), eager_bytes=kept, columns=())

    def group_heads(self, attention: AttentionOperator, tensor: int) -> None:
        """Note in the product of queries, keys and values how many heads share keys and values."""
        wide = attention.query_key_width + attention.value_width
        groups, rest = divmod(attention.key_value_width, wide)
        product = self._product(tensor)
        if not rest and groups < attention.heads and attention.key_value_width < product.out_width:
            self.operators[tensor - self.num_inputs] = msgspec.structs.replace(
                product, groups=groups, group_columns=attention.key_value_width
            )

    def join_gate(self, number: int) -> None:
        """Join two products that one kernel reads."""
        kernel = self.operators[number]
        assert isinstance(kernel, KernelOperator)
        both = [self.producer(read) for read in kernel.reads]
        if not all(
            isinstance(each, ProductOperator) and self.readers(r) == 1
            for each, r in zip(both, kernel.reads, strict=True)
        ):
            return
        if not self.can_join(kernel.reads):
            return
        joined = self.join_products(list(kernel.reads))
        changed = {name: _one(getattr(kernel, name), kernel.reads, joined) for name in ("saves", "eager_saves")}
        self.operators[number] = msgspec.structs.replace(kernel, reads=(joined,), **changed)

    def can_join(self, tensors: Sequence[int]) -> bool:
        """Return whether products read the same rows of one tensor. A class token's query reads only the first."""
        products = [self._product(t) for t in tensors]
        return len({(p.reads, p.rows, p.in_width) for p in products}) == 1

    def join_products(self, tensors: Sequence[int]) -> int:
        """Join products of one tensor; return the tensor of the joined one."""
        products = [self._product(t) for t in tensors]
        if len(products) == 1:
            return tensors[0]
        first = min(tensors)
        self.operators[first - self.num_inputs] = msgspec.structs.replace(
            products[0],
            out_width=sum(p.out_width for p in products),
            biases=sum(p.biases for p in products),
            owned=all(p.owned for p in products),
        )
        self.gone |= {t: first for t in tensors if t != first}
        return first

    def join_kernels(self, tensors: Sequence[int], reads: int, width: int) -> int:
        """Join kernels of one kind on parts of a tensor; return the tensor of the joined one."""
        kernels = [self._kernel(t) for t in tensors]
        last = max(tensors)
        names = ("flops", "forward_bytes", "backward_bytes", "backward_flops", "statistics", "eager_bytes")
        summed = {name: total([getattr(k, name) for k in kernels]) for name in names}
        before = self.producer(reads)
        assert isinstance(before, (ProductOperator, KernelOperator))
        self.operators[last - self.num_inputs] = msgspec.structs.replace(
            kernels[-1],
            reads=(reads,),
            rows=before.rows,
            width=width,
            saves=(reads,) if any(k.saves for k in kernels) else (),
            eager_saves=(reads,) if any(k.eager_saves for k in kernels) else (),
            parameters=sum(k.parameters for k in kernels),
            **summed,
        )
        self.gone |= {t: last for t in tensors if t != last}
        return last

    def _product(self, tensor: int) -> ProductOperator:
        operator = self.producer(tensor)
        assert isinstance(operator, ProductOperator)
        return operator

    def _kernel(self, tensor: int) -> KernelOperator:
        operator = self.producer(tensor)
        assert isinstance(operator, KernelOperator)
        return operator

    def renumbered(self, result: int | None) -> tuple[list[Operator], int | None]:
        """Return the operators that are left, in an order in which each reads only earlier ones."""
        numbers = {i: i for i in range(self.num_inputs)}
        out: list[Operator] = []
        left = [self.num_inputs + i for i in range(len(self.operators)) if self.num_inputs + i not in self.gone]
        while left:
            for tensor in left:
                operator = self.producer(tensor)
                assert operator is not None
                reads = reads_of(operator)
                if all(self.gone.get(r, r) in numbers for r in reads):
                    break
            else:
                raise AssertionError("operators read each other")
            left.remove(tensor)
            new = {r: numbers[self.gone.get(r, r)] for r in reads}
            numbers[tensor] = self.num_inputs + len(out)
            out.append(_renamed(operator, new))
        for part, whole in self.gone.items():
            numbers[part] = numbers[whole]
        return out, None if result is None else numbers[result]


def _renamed(operator: Operator, new: dict[int, int]) -> Operator:
    if isinstance(operator, ProductOperator):
        return msgspec.structs.replace(operator, reads=new[operator.reads])
    changed = {"reads": tuple(dict.fromkeys(new[r] for r in operator.reads))}
    if isinstance(operator, AttentionOperator) and len(changed["reads"]) < len(operator.reads):
        changed["columns"] = ()
    if isinstance(operator, KernelOperator):
        for name in ("saves", "eager_saves"):
            changed[name] = tuple(dict.fromkeys(new[r] for r in getattr(operator, name)))
    return msgspec.structs.replace(operator, **changed)


def _one(saves: tuple[int, ...], parts: tuple[int, ...], whole: int) -> tuple[int, ...]:
    return (whole,) if any(each in parts for each in saves) else ()


def times(counts: Counts, factor: float) -> Counts:
    """Return a count times a number."""
    one, instances, tokens, pairs = (each * factor for each in counts)
    return one, instances, tokens, pairs


def total(counts: Sequence[Counts]) -> Counts:
    """Return the sum of counts."""
    one, instances, tokens, pairs = (sum(each) for each in zip(*counts, strict=True))
    return one, instances, tokens, pairs
