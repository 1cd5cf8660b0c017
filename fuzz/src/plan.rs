//! A plan for GPUs that fits the small program, and changes of it.

use gemma4_format::Program;
use gemma4_format::plan::{
    Argument, Count, Kernel, Launch, Lowered, Pack, Packed, Place, Plan, table,
};

use super::edit::Script;

/// A plan with one kernel, which every launch takes.
pub(crate) fn plan(program: &Program) -> Plan {
    let launch = Launch {
        kernel: 0,
        grid: [Count::Rows { per: 2, times: 3 }, Count::Fixed(1), Count::Fixed(1)],
        arguments: vec![
            Argument::Address(Place::Packed(0), 16),
            Argument::Address(Place::Resident(0), 0),
            Argument::Address(Place::Table, 8 * u64::from(table::STATE)),
            Argument::LastRow { place: Place::Scratch, offset: 0, stride: 64 },
            Argument::BufferRows(0),
            Argument::Count(Count::Multiprocessors { times: 2, share: 1, limit: 8 }),
        ],
    };
    let lowered = |method: &gemma4_format::Method| Lowered {
        method: method.name.clone(),
        min_rows: 1,
        max_rows: method.max_rows,
        launches: vec![launch.clone(); 2],
    };
    Plan {
        target: "sm_90a".to_owned(),
        compiler: "none".to_owned(),
        kernels: vec![Kernel {
            module: 0,
            symbol: "k".to_owned(),
            block: 128,
            shared: 0,
            overlaps: true,
        }],
        packed: vec![Packed { bytes: 4096, randomize: 0, randomize_blocks: 4, columns: 32 }],
        packs: vec![Pack {
            kernel: 0,
            packed: 0,
            sources: vec![0],
            rows_per_tile: 16,
            first_tile: 0,
            total_rows: 32,
            units_per_tile: 1,
            warps_per_block: 8,
        }],
        resident: vec![(1, 0)],
        position_bytes: vec![64; program.buffers.len()],
        multiprocessors: 132,
        scratch: 8192,
        methods: program.methods.iter().map(lowered).collect(),
        sample: vec![launch],
    }
}

/// Makes one change of a plan.
pub(crate) fn edit(script: &mut Script<'_>, plan: &mut Plan) {
    match script.byte() % 8 {
        0 => plan.scratch = u64::from(script.number()) << script.index(40),
        1 => plan.multiprocessors = script.number(),
        2 if script.byte().is_multiple_of(2) => plan.position_bytes.push(script.number()),
        2 => {
            let at = script.index(plan.position_bytes.len());
            plan.position_bytes[at] = script.number();
        }
        3 => plan.resident.push((script.number(), script.number())),
        4 => {
            let pack = &mut plan.packs[0];
            let numbers = [
                &mut pack.kernel,
                &mut pack.packed,
                &mut pack.rows_per_tile,
                &mut pack.first_tile,
                &mut pack.total_rows,
                &mut pack.units_per_tile,
                &mut pack.warps_per_block,
            ];
            let at = script.index(8);
            match numbers.into_iter().nth(at) {
                Some(number) => *number = script.number(),
                None => pack.sources.push(script.number()),
            }
        }
        5 => {
            let packed = &mut plan.packed[0];
            packed.bytes = u64::from(script.number()) << script.index(40);
            packed.randomize = script.number();
        }
        6 => {
            let at = script.index(plan.methods.len());
            let Some(form) = plan.methods.get_mut(at) else { return };
            match script.byte() % 2 {
                0 => form.min_rows = script.number(),
                _ => form.max_rows = script.number(),
            }
        }
        _ => {
            let at = script.index(plan.methods.len() + 1);
            let launches = match plan.methods.get_mut(at) {
                Some(form) => &mut form.launches,
                None => &mut plan.sample,
            };
            let at = script.index(launches.len());
            let Some(launch) = launches.get_mut(at) else { return };
            match script.byte() % 3 {
                0 => launch.kernel = script.number(),
                1 => launch.grid[script.index(3)] = count(script),
                _ => {
                    let at = script.index(launch.arguments.len() + 1);
                    let argument = argument(script);
                    match launch.arguments.get_mut(at) {
                        Some(old) => *old = argument,
                        None => launch.arguments.push(argument),
                    }
                }
            }
        }
    }
}

fn count(script: &mut Script<'_>) -> Count {
    let (a, b) = (script.number(), script.number());
    match script.byte() % 4 {
        0 => Count::Fixed(a),
        1 => Count::Rows { per: a, times: b },
        2 => Count::Context { per: a, times: b },
        _ => Count::Multiprocessors { times: a, share: b, limit: script.number() },
    }
}

fn argument(script: &mut Script<'_>) -> Argument {
    let place = match script.byte() % 6 {
        0 => Place::Packed(script.number()),
        1 => Place::Resident(script.number()),
        2 => Place::Scratch,
        3 => Place::Table,
        4 => Place::Logits,
        _ => Place::Stops,
    };
    let offset = u64::from(script.number()) << script.index(34);
    match script.byte() % 6 {
        0 | 1 => Argument::Address(place, offset),
        2 => Argument::LastRow {
            place,
            offset,
            stride: u64::from(script.number()) << script.index(48),
        },
        3 => Argument::BufferRows(script.number()),
        4 => Argument::Count(count(script)),
        _ => Argument::F32(script.real()),
    }
}
