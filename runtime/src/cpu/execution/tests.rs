//! No byte of a call's memory is read before the call writes it, or after its value has died.

use super::*;

#[path = "../../../tests/common/mod.rs"]
mod common;

use common::{Config, Model, Random};

/// Index of the last node that reads each value, itself or through a result that shares its
/// memory; past all nodes for inputs and outputs.
fn last_reads(method: &Method, results: &[Option<ValueId>], values: usize) -> Vec<usize> {
    let mut last = vec![0; values];
    last[..method.inputs.len()].fill(method.nodes.len());
    for output in &method.outputs {
        last[output.value as usize] = method.nodes.len();
    }
    for (at, (node, result)) in method.nodes.iter().zip(results).enumerate().rev() {
        let shares = matches!(node.op, Op::SplitHeads { .. } | Op::MergeHeads);
        let until = result.filter(|_| shares).map_or(at, |id| at.max(last[id as usize]));
        for arg in &node.args {
            if let Operand::Value(id) = arg {
                last[*id as usize] = last[*id as usize].max(until);
            }
        }
    }
    last
}

/// Fills all numbers in which no value lies that was computed before node `at` and is read there
/// or later.
fn poison(call: &mut Call<'_>, last: &[usize], computed: usize, at: usize) -> usize {
    let mut alive =
        [vec![false; call.memory.reals.as_slice().len()], vec![false; call.memory.integers.len()]];
    for (id, last) in last.iter().enumerate().take(computed) {
        let real = call.plan.places[id].fact.dtype == ValueType::F32;
        if *last >= at {
            alive[usize::from(!real)][call.range(id as ValueId)].fill(true);
        }
    }
    let [reals, integers] = &alive;
    let dead = |alive: &[bool]| alive.iter().filter(|alive| !**alive).count();
    for (x, _) in call.memory.reals.as_mut_slice().iter_mut().zip(reals).filter(|(_, a)| !**a) {
        *x = f32::NAN;
    }
    for (x, _) in call.memory.integers.iter_mut().zip(integers).filter(|(_, a)| !**a) {
        *x = u32::MAX;
    }
    call.memory.scratch.as_mut_slice().fill(f32::NAN);
    dead(reals) + dead(integers)
}

/// As [`Execution::run`], poisoning all memory that holds nothing before each node.
fn run_poisoned(execution: &mut Execution, entry: Entry, tokens: &[u32], position: u32) -> usize {
    let cpu = execution.cpu.clone();
    let method = method(&cpu, entry).expect("it is there");
    let plan = execution.plans.of(entry).expect("it is there");
    execution.last = (entry, tokens.len() as u32);
    let mut call = Call {
        cpu: &cpu,
        plan,
        extents: Extents { rows: tokens.len() as u32, context: execution.context },
        position,
        memory: &mut execution.memory,
        buffers: &mut execution.buffers,
    };
    let last = last_reads(method, &plan.results, plan.places.len());
    let mut poisoned = poison(&mut call, &last, 0, 0);
    for (id, input) in method.inputs.iter().enumerate() {
        call.give(id as ValueId, &input.name, tokens, &Sampling::GREEDY);
    }
    let mut computed = method.inputs.len();
    for (at, (node, result)) in method.nodes.iter().zip(&plan.results).enumerate() {
        poisoned += poison(&mut call, &last, computed, at);
        call.execute(node, *result).expect("runs");
        computed += usize::from(result.is_some());
    }
    poisoned + poison(&mut call, &last, computed, method.nodes.len())
}

#[test]
fn memory_without_a_living_value_may_hold_anything() {
    let config = Config::default();
    let cpu = Cpu::with_threads(Model::new(&config).load(), 1).expect("a device");
    let tokens = Random(4).tokens(40, config.vocabulary);
    let mut clean = cpu.execution(64, 8).expect("small");
    let mut other = cpu.execution(64, 8).expect("small");
    let mut position = 0;
    for (entry, count) in
        [(Entry::Prefill, 8), (Entry::Decode, 1), (Entry::Verify, 5), (Entry::Prefill, 3)]
            .into_iter()
            .cycle()
            .take(8)
    {
        let piece = &tokens[position..position + count];
        clean.run(entry, piece, position as u32, &Sampling::GREEDY).expect("runs");
        let poisoned = run_poisoned(&mut other, entry, piece, position as u32);
        assert!(poisoned > 10_000, "only {poisoned} numbers were poisoned");
        let rows = if entry == Entry::Verify { count as u32 } else { 1 };
        for row in 0..rows {
            let bits = |execution: &mut Execution| -> Vec<u32> {
                execution.logits(row).expect("logits").iter().map(|x| x.to_bits()).collect()
            };
            assert_eq!(bits(&mut clean), bits(&mut other), "{entry:?} at {position}");
        }
        position += count;
    }
}
