"""Decides from a frame's plan, before any claim, whether its result depends on which messages share a batch.

Which messages a claim takes is arbitrary, and a batch is split when a row breaks the job. So each row of the result
must depend on one message and static data only. The walk over Spark's analysed plan follows the identity of the
messages, the columns `_partition` and `_offset`, from operator to operator. An operator that is not known here is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from custody.errors import PipelineRefused

IDENTITY = ("_partition", "_offset")
_MARK = "custody.message"
"""Metadata key of the identity columns, which distinguishes messages from static data."""

PLAIN_SOURCE = (
    "To work over many messages, use the plain source, spark.readStream.format('custody'): it reads the topic by "
    "offset, without a lifecycle."
)
_WITHIN = f"Group by _partition and _offset to stay within one message. {PLAIN_SOURCE}"
_LEFT = "Join with static data, the messages on the left of a left, inner, semi or anti join."
_FILTER = f"Select messages with where(), or postpone them with fail_when(…, retry_after=…). {PLAIN_SOURCE}"

# operators that make each row from one row, or that only move rows
_ROW_BY_ROW = {"Project", "Filter", "Generate", "SubqueryAlias", "View", "ResolvedHint", "Sort", "Repartition",
               "RepartitionByExpression", "RebalancePartitions", "TypedFilter", "WithCTE",
               "CTERelationDef", "PipeOperator", "CollectMetrics"}  # fmt: skip
# functions of the user: the identity of their rows is known by the names of the columns alone
_OPAQUE = {"MapInArrow", "MapInPandas"}
_GROUPED = {"FlatMapGroupsInPandas", "FlatMapGroupsInArrow"}
_JOINS = {"Join", "AsOfJoin", "LateralJoin"}
# operators that keep rows in their task and in order
_NARROW = {"Project", "Filter", "Generate", "SubqueryAlias", "View", "MapInArrow", "MapInPandas", "LogicalRDD",
           "LocalRelation", "TypedFilter"}  # fmt: skip
# the API names of operators, and what to use instead
_REFUSED = {
    "Aggregate": ("groupBy() or an aggregate", _WITHIN),
    "Distinct": ("distinct()", _WITHIN),
    "Deduplicate": ("dropDuplicates() or distinct()", _WITHIN),
    "DeduplicateWithinWatermark": ("dropDuplicatesWithinWatermark()", PLAIN_SOURCE),
    "FlatMapGroupsInPandas": ("applyInPandas()", _WITHIN),
    "FlatMapGroupsInArrow": ("applyInArrow()", _WITHIN),
    "FlatMapCoGroupsInPandas": ("cogroup()", _WITHIN),
    "FlatMapCoGroupsInArrow": ("cogroup()", _WITHIN),
    "FlatMapGroupsInPandasWithState": ("applyInPandasWithState()", PLAIN_SOURCE),
    "TransformWithStateInPySpark": ("transformWithState()", PLAIN_SOURCE),
    "Window": ("a window function", f"Partition the window by _partition and _offset. {PLAIN_SOURCE}"),
    "GlobalLimit": ("limit()", _FILTER),
    "LocalLimit": ("limit()", _FILTER),
    "Offset": ("offset()", _FILTER),
    "Sample": ("sample()", f"where(F.rand() < …) keeps a share of the messages. {PLAIN_SOURCE}"),
    "Intersect": ("intersect()", f"Use a left_semi join with static data. {PLAIN_SOURCE}"),
    "Except": ("subtract() or exceptAll()", f"Use a left_anti join with static data. {PLAIN_SOURCE}"),
    "EventTimeWatermark": ("withWatermark()", f"A batch has no watermark, so it would do nothing. {PLAIN_SOURCE}"),
    "AttachDistributedSequence": ("zipWithIndex()", "_partition and _offset identify a message permanently."),
}


class Identity(NamedTuple):
    """The ids of the columns that are a message's partition, and of those that are its offset."""

    partition: frozenset[int]
    offset: frozenset[int]

    def among(self, columns: Iterator[Any]) -> bool:
        """Whether these columns include a partition and an offset of the message."""
        ids = {column for column in map(_column, columns) if column is not None}
        return bool(ids & self.partition) and bool(ids & self.offset)

    def carried(self, before: list[list[Any]], after: list[Any]) -> Identity:
        """The identity after an operator, whose column n is computed from each of the expressions before[…][n]."""
        kept: tuple[set[int], set[int]] = (set(self.partition), set(self.offset))
        for number, column in enumerate(after):
            made_of = {_column(expressions[number]) for expressions in before}
            for ids, known in zip(kept, self, strict=True):
                ids.discard(_id(column))
                if made_of <= known:
                    ids.add(_id(column))
        return Identity(frozenset(kept[0]), frozenset(kept[1]))


def sample_input(spark: SparkSession, schema: StructType) -> DataFrame:
    """An empty DataFrame with the columns of a frame's input, to check the plan that the frame makes of it."""
    fields = [
        StructField(one.name, one.dataType, False, {_MARK: True}) if one.name in IDENTITY else one for one in schema
    ]
    return spark.createDataFrame([], StructType(fields))


def streaming_input(spark: SparkSession, schema: StructType) -> DataFrame:
    """The same as a stream. Spark drops a watermark from the plan of a batch, but keeps it in that of a stream."""
    rate = spark.readStream.format("rate").load()
    return rate.select(*(F.lit(None).cast(one.dataType).alias(one.name) for one in schema))


def require_message_by_message(result: DataFrame) -> bool:
    """Refuses a result that is not computed message by message, and names the operator.

    Returns whether rows stay in their task and in order.
    """
    plan = result._jdf.queryExecution().analyzed()
    walk = _Walk()
    identity = walk.identity(plan)
    if identity is None:
        raise PipelineRefused(
            "the frame's result is not derived from its input",
            "Derive it from the DataFrame that the frame gets, without collect() or .rdd. To run any Python code, use "
            "mapInPandas or mapInArrow.",
        )
    output = {column.name(): _id(column) for column in _all(plan.output())}
    for name, ids in zip(IDENTITY, identity, strict=True):
        if output[name] not in ids:
            raise PipelineRefused(
                f"the frame changes the column {name}, which identifies the message of a row",
                "Keep _partition and _offset unchanged. Restrict a function that changes all columns: "
                "replace(…, subset=[…]).",
            )
    return walk.narrow


def require_no_watermark(result: DataFrame) -> None:
    """Checks a result made from `streaming_input`."""
    plan = result._jdf.queryExecution().analyzed()
    if any(_name(node) == "EventTimeWatermark" for node in _nodes(plan)):
        raise _refused("EventTimeWatermark")


@dataclass
class _Walk:
    narrow: bool = True
    defined: dict[int, tuple[Any, Identity | None]] = field(default_factory=dict)
    """Common table expressions of SQL: their columns and identity, by number."""

    def identity(self, plan: Any) -> Identity | None:
        """The columns of a plan that identify its messages; None if it has no messages."""
        name = _name(plan)
        for subquery in _all(plan.subqueries()):
            if self._has_messages(subquery):
                raise PipelineRefused(
                    "the frame has a subquery over its messages: its result would depend on which messages share a "
                    "batch",
                    f"A subquery over static data is allowed. {PLAIN_SOURCE}",
                )
        children = [(child, self.identity(child)) for child in _all(plan.children())]
        if name == "CTERelationDef":
            self.defined[plan.id()] = (list(_all(plan.output())), children[0][1])
        if name == "CTERelationRef" and plan.cteId() in self.defined:
            columns, known = self.defined[plan.cteId()]
            return None if known is None else known.carried([columns], list(_all(plan.output())))
        if name == "WithCTE":
            children = children[-1:]
        if not children:
            return _marked(plan)
        known_ones = [known for _, known in children if known is not None]
        if not known_ones:
            return None
        self.narrow = self.narrow and name in _NARROW
        if name in _JOINS:
            return _joined(plan, [known for _, known in children])
        if name == "Union":
            return _united(plan, [known for _, known in children])
        return _through(name, plan, known_ones[0])

    def _has_messages(self, plan: Any) -> bool:
        return any(
            _marked(node) is not None
            or (_name(node) == "CTERelationRef" and self.defined.get(node.cteId(), (None, None))[1] is not None)
            for node in _nodes(plan)
        )


def _through(name: str, plan: Any, known: Identity) -> Identity:
    """The identity after an operator with one input."""
    if name in _ROW_BY_ROW:
        _require_no_numbering(plan)
        if name != "Project":
            return known
        made = list(_all(plan.projectList()))
        return known.carried([made], made)
    if name in _OPAQUE:
        return _by_name(plan)
    if name in _GROUPED and known.among(_all(plan.groupingAttributes())):
        return _by_name(plan)
    if name == "Aggregate" and known.among(_all(plan.groupingExpressions())):
        made = list(_all(plan.aggregateExpressions()))
        return known.carried([made], made)
    if (
        (name == "Distinct" and known.among(_all(plan.output())))
        or (name == "Deduplicate" and known.among(_all(plan.keys())))
        or (name == "Window" and known.among(_all(plan.partitionSpec())))
    ):
        return known
    if name == "Expand":  # unpivot; with grouping sets the identity is null in some of the rows
        return known.carried([list(_all(one)) for one in _all(plan.projections())], list(_all(plan.output())))
    raise _refused(name)


def _joined(plan: Any, known: list[Identity | None]) -> Identity:
    left, right = known[0], known[1] if len(known) > 1 else None  # a lateral join's is a subquery
    kind = plan.joinType().toString().removesuffix("Outer")
    if left is not None and right is not None:
        if kind not in ("Inner", "Left", "LeftSemi", "LeftAnti") or not _same_message(plan, left, right):
            raise PipelineRefused(
                "the frame joins messages with messages: a pair is found only if both are in one batch",
                f"{_LEFT} Rows of the same message may be joined on _partition and _offset. {PLAIN_SOURCE}",
            )
        if kind in ("LeftSemi", "LeftAnti", "Left"):
            return left
        return Identity(left.partition | right.partition, left.offset | right.offset)
    if left is None and _name(plan) == "AsOfJoin":
        raise PipelineRefused(
            "the frame looks for the nearest message, which is that of the batch", f"{_LEFT} {PLAIN_SOURCE}"
        )
    sound = ("Inner", "Cross", "Left", "LeftSemi", "LeftAnti") if left is not None else ("Inner", "Cross", "Right")
    if kind not in sound:
        side = "right" if left is not None else "left"
        raise PipelineRefused(
            f"the frame has a join ({_spoken(kind)}) that keeps static rows from its {side} side, and a row without a "
            "message belongs to none",
            f"{_LEFT} {PLAIN_SOURCE}",
        )
    found = left or right
    assert found is not None
    return found


def _same_message(plan: Any, left: Identity, right: Identity) -> bool:
    """Whether a join asks for equal partitions and equal offsets."""
    if _name(plan) != "Join" or plan.condition().isEmpty():
        return False
    equal = [
        {_column(one.left()), _column(one.right())}
        for one in _conjuncts(plan.condition().get())
        if _name(one) in ("EqualTo", "EqualNullSafe")
    ]
    return all(any(pair & mine and pair & theirs for pair in equal) for mine, theirs in zip(left, right, strict=True))


def _united(plan: Any, known: list[Identity | None]) -> Identity:
    if any(one is None for one in known):
        raise PipelineRefused(
            "the frame has a union with static rows, and a row without a message belongs to none",
            f"Make further rows of a message with explode(), or {_LEFT[0].lower()}{_LEFT[1:]} {PLAIN_SOURCE}",
        )
    every = Identity(
        frozenset().union(*(one.partition for one in known if one is not None)),
        frozenset().union(*(one.offset for one in known if one is not None)),
    )
    return every.carried([list(_all(child.output())) for child in _all(plan.children())], list(_all(plan.output())))


def _require_no_numbering(plan: Any) -> None:
    for expression in _all(plan.expressions()):
        if not expression.deterministic() and any(
            _name(one) == "MonotonicallyIncreasingID" for one in _expressions(expression)
        ):
            raise PipelineRefused(
                "the frame has monotonically_increasing_id(), which restarts in every batch",
                "_partition and _offset identify a message permanently.",
            )


def _by_name(plan: Any) -> Identity:
    """The identity in the result of a user's function: the columns with these names."""
    ids = [frozenset(_id(one) for one in _all(plan.output()) if one.name() == name) for name in IDENTITY]
    return Identity(*ids)


def _marked(leaf: Any) -> Identity | None:
    """The identity in the input of a frame; None for anything else."""
    marked = [column for column in _all(leaf.output()) if column.metadata().contains(_MARK)]
    if not marked or leaf.children().size() > 0:
        return None
    return Identity(*(frozenset(_id(one) for one in marked if one.name() == name) for name in IDENTITY))


def _refused(name: str) -> PipelineRefused:
    spoken, remedy = _REFUSED.get(name, (f"the operator {name}", PLAIN_SOURCE))
    shown = "" if name in spoken else f" ({name})"
    return PipelineRefused(
        f"the frame has {spoken}{shown} over its messages: its result would depend on which messages share a batch",
        remedy,
    )


def _spoken(kind: str) -> str:
    return {"LeftSemi": "left semi", "LeftAnti": "left anti"}.get(kind, kind.lower())


def _column(expression: Any) -> int | None:
    """The id of the column that an expression passes on unchanged; None if it computes something."""
    while (inner := _passed_on(expression)) is not None:
        expression = inner
    return _id(expression) if _name(expression) == "AttributeReference" else None


def _passed_on(expression: Any) -> Any:
    """The inner expression whose value this one has; None if it computes its own."""
    name = _name(expression)
    if name == "Alias" or (name == "Cast" and expression.dataType().equals(expression.child().dataType())):
        return expression.child()
    if name == "Coalesce" and not expression.children().head().nullable():  # fillna() replaces every number
        return expression.children().head()
    return None


def _conjuncts(condition: Any) -> Iterator[Any]:
    if _name(condition) == "And":
        yield from _conjuncts(condition.left())
        yield from _conjuncts(condition.right())
    else:
        yield condition


def _expressions(expression: Any) -> Iterator[Any]:
    yield expression
    for child in _all(expression.children()):
        yield from _expressions(child)


def _nodes(plan: Any) -> Iterator[Any]:
    """All operators of a plan, including those of its subqueries."""
    yield plan
    for below in (*_all(plan.children()), *_all(plan.subqueries())):
        yield from _nodes(below)


def _id(column: Any) -> int:
    return int(column.exprId().id())


def _name(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _all(seq: Any) -> Iterator[Any]:
    """The elements of a Scala sequence."""
    return (seq.apply(number) for number in range(seq.size()))
