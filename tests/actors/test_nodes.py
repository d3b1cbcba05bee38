"""Which nodes of a cluster are the fabric's, and what a reconciler does about them."""

from kvfabric.actors.nodes import (
    FabricNode,
    PoolPlan,
    fabric_nodes,
    listen_addresses,
    plan_pools,
)


def node(name, value=None, address="10.0.0.1"):
    return FabricNode(name, "kvfabric/node", value or name, address)


def record(number, *, name=None, alive=True, address="10.0.0.1", **labels):
    return {
        "NodeID": f"{number:056x}",
        "NodeName": name or address,
        "NodeManagerAddress": address,
        "Alive": alive,
        "Labels": {"ray.io/node-id": f"{number:056x}", **labels},
    }


def test_pools_follow_the_nodes_that_are_alive():
    a, b, c = node("a"), node("b"), node("c")
    assert plan_pools([b, a], []) == PoolPlan((a, b), ())
    assert plan_pools([a, b], [b, a]) == PoolPlan((), ())
    assert plan_pools([b, c], [a, b]) == PoolPlan((c,), (a,))
    assert plan_pools([], [a, b]) == PoolPlan((), (a, b))


def test_a_node_that_came_back_with_another_selector_gets_a_new_pool():
    before, after = node("a", "id-1"), node("a", "id-2")
    assert plan_pools([after], [before]) == PoolPlan((after,), (before,))
    moved = node("a", address="10.0.0.2")
    assert plan_pools([moved], [node("a")]) == PoolPlan((), ())


def test_labelled_nodes_are_the_fabrics_and_no_others():
    records = [
        record(1, **{"kvfabric/node": "b"}),
        record(2, **{"kvfabric/node": "a"}),
        record(3),
        record(4, alive=False, **{"kvfabric/node": "c"}),
    ]
    found = fabric_nodes(records)
    assert [n.name for n in found] == ["a", "b"]
    assert found[0].selector == {"kvfabric/node": "a"}


def test_a_plain_cluster_is_used_whole_by_node_id():
    one, two = record(1, address="10.0.0.1"), record(2, address="10.0.0.2")
    dead = record(3, address="10.0.0.2", alive=False)
    found = fabric_nodes([two, one, dead])
    assert [n.name for n in found] == ["10.0.0.1", "10.0.0.2"]
    assert found[0].selector == {"ray.io/node-id": f"{1:056x}"}
    assert [n.address for n in found] == ["10.0.0.1", "10.0.0.2"]


def test_names_that_clash_or_are_no_names_give_way_to_ids():
    clash = fabric_nodes([record(1), record(2)])
    assert [n.name for n in clash] == [f"{1:056x}", f"{2:056x}"]
    (six,) = fabric_nodes([record(1, name="fe80::1")])
    assert six.name == f"{1:056x}"
    assert fabric_nodes([]) == []


def test_pools_listen_to_the_network_only_if_there_are_other_machines():
    alone = listen_addresses([node("a"), node("b")])
    assert alone == {"a": "127.0.0.1", "b": "127.0.0.1"}
    two = [node("a"), node("b", address="10.0.0.2")]
    assert listen_addresses(two) == {"a": "10.0.0.1", "b": "10.0.0.2"}
