//! Launches of a plan with their numbers and addresses filled in.

use gemma4_format::plan::{Argument, Launch, Lowered, Place, Plan};
use gemma4_format::{Extents, Program};

use super::layout::Layout;

/// Largest grid in y and z that GPUs take.
const LARGEST_GRID: u32 = 65_535;

/// One launch: kernel, grid, and which words are its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Resolved {
    /// Index into [`Plan::kernels`].
    pub(super) kernel: u32,
    /// Blocks in x, y and z.
    pub(super) grid: [u32; 3],
    first: usize,
    count: usize,
}

/// Launches whose arguments lie in one block, each from the first byte of a word of 8 on.
#[derive(Clone, Debug, Default)]
pub(super) struct Launches {
    list: Vec<Resolved>,
    words: Vec<u64>,
}

impl Launches {
    /// Launches in order, with the words of their arguments.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Resolved, &[u64])> {
        self.list.iter().map(|launch| (launch, &self.words[launch.first..][..launch.count]))
    }
}

/// What the symbolic numbers and places of a plan stand for.
pub(super) struct Resolver<'a> {
    pub(super) program: &'a Program,
    pub(super) layout: &'a Layout,
    /// `S`.
    pub(super) context: u32,
    /// `P`.
    pub(super) multiprocessors: u32,
}

impl Resolver<'_> {
    /// Fills in a call of `rows` rows. Fails with a sentence if a number does not fit, a grid is
    /// empty or too large, or an address lies outside its place.
    pub(super) fn resolve(&self, launches: &[Launch], rows: u32) -> Result<Launches, String> {
        let extents = Extents { rows, context: self.context };
        let mut resolved = Launches::default();
        for (at, launch) in launches.iter().enumerate() {
            let first = resolved.words.len();
            for argument in &launch.arguments {
                let word = self.argument(*argument, extents);
                let why = || format!("launch {at}: {argument:?} is out of range for {rows} rows");
                resolved.words.push(word.ok_or_else(why)?);
            }
            let grid = launch.grid.map(|count| count.resolve(extents, self.multiprocessors));
            let grid = match grid {
                [Some(x), Some(y), Some(z)] => [x, y, z],
                _ => [0; 3],
            };
            let [x, y, z] = grid;
            if x == 0
                || x > i32::MAX as u32
                || ![y, z].iter().all(|n| (1..=LARGEST_GRID).contains(n))
            {
                return Err(format!("launch {at}: {:?} is no grid for {rows} rows", launch.grid));
            }
            let count = launch.arguments.len();
            resolved.list.push(Resolved { kernel: launch.kernel, grid, first, count });
        }
        Ok(resolved)
    }

    fn argument(&self, argument: Argument, extents: Extents) -> Option<u64> {
        let word = match argument {
            Argument::Address(place, offset) => return self.address(place, offset),
            Argument::LastRow { place, offset, stride } => {
                // A call of no rows reads what the call before it left in row 0.
                let last = u64::from(extents.rows.saturating_sub(1));
                return self.address(place, last.checked_mul(stride)?.checked_add(offset)?);
            }
            Argument::Null => return Some(0),
            Argument::U32(n) => n,
            Argument::F32(x) => x.to_bits(),
            Argument::Count(count) => count.resolve(extents, self.multiprocessors)?,
            Argument::BufferRows(id) => {
                let buffer = self.program.buffers.get(id as usize)?;
                buffer.dims.first()?.resolve(extents)
            }
        };
        Some(u64::from(word))
    }

    fn address(&self, place: Place, offset: u64) -> Option<u64> {
        let region = self.layout.place(place)?;
        (offset < region.bytes).then(|| region.at + offset)
    }
}

/// The lowered form of a method that a call of up to `rows` rows runs, and how many rows of it
/// that takes: the narrowest that takes all, or else the widest.
pub(super) fn lowered<'a>(plan: &'a Plan, method: &str, rows: u32) -> Option<(&'a Lowered, u32)> {
    let forms = || plan.methods.iter().filter(|m| m.method == method && m.min_rows <= rows);
    let narrowest = forms().filter(|m| rows <= m.max_rows).min_by_key(|m| m.max_rows);
    let chosen = narrowest.or_else(|| forms().max_by_key(|m| m.max_rows))?;
    Some((chosen, rows.min(chosen.max_rows)))
}

#[cfg(test)]
mod tests {
    use gemma4_format::plan::Count;

    use super::*;
    use crate::cuda::testing::{plan_for, program};

    fn launch(grid: [Count; 3], arguments: Vec<Argument>) -> Launch {
        Launch { kernel: 3, grid, arguments }
    }

    fn resolve(launch: Launch, rows: u32) -> Result<(Vec<u64>, [u32; 3]), String> {
        let (program, plan) = (program(), plan_for("sm_90"));
        let layout = Layout::new(&program, &plan, 40, 1, 4096).expect("small");
        let resolver =
            Resolver { program: &program, layout: &layout, context: 40, multiprocessors: 132 };
        let launches = resolver.resolve(&[launch.clone(), launch], rows)?;
        let all: Vec<_> = launches.iter().map(|(l, words)| (words.to_vec(), l.grid)).collect();
        assert_eq!(all.len(), 2);
        assert_eq!(all[0], all[1]);
        Ok(all[0].clone())
    }

    const ONE: Count = Count::Fixed(1);

    #[test]
    fn addresses_and_numbers_are_words() {
        let layout = Layout::new(&program(), &plan_for("sm_90"), 40, 1, 4096).expect("small");
        let arguments = vec![
            Argument::Address(Place::Packed(0), 0),
            Argument::Address(Place::Scratch, 1000),
            Argument::Address(Place::Table, 0),
            Argument::Address(Place::Logits, 8),
            Argument::Address(Place::Stops, 4),
            Argument::Address(Place::Resident(0), 2),
            Argument::Null,
            Argument::U32(u32::MAX),
            Argument::F32(-1.5),
            Argument::Count(Count::Rows { per: 4, times: 3 }),
            Argument::Count(Count::Context { per: 16, times: 1 }),
            Argument::BufferRows(0),
            Argument::BufferRows(1),
        ];
        let (words, _) = resolve(launch([ONE; 3], arguments), 5).expect("valid");
        let expected = [
            4096,
            layout.scratch.at + 1000,
            layout.table.at,
            layout.logits.at + 8,
            layout.stops.at + 4,
            layout.resident[0].at + 2,
            0,
            u64::from(u32::MAX),
            u64::from((-1.5f32).to_bits()),
            6,
            3,
            14,
            40,
        ];
        assert_eq!(words, expected);
    }

    #[test]
    fn the_last_row_follows_the_rows_of_the_call() {
        let layout = Layout::new(&program(), &plan_for("sm_90"), 40, 1, 4096).expect("small");
        let last = Argument::LastRow { place: Place::Scratch, offset: 64, stride: 256 };
        for (rows, row) in [(0, 0), (1, 0), (2, 1), (8, 7)] {
            let (words, _) = resolve(launch([ONE; 3], vec![last]), rows).expect("valid");
            assert_eq!(words, [layout.scratch.at + 64 + row * 256], "{rows} rows");
        }
        // Scratch has 8192 bytes.
        assert!(resolve(launch([ONE; 3], vec![last]), 33).is_err());
        let far = Argument::LastRow { place: Place::Scratch, offset: u64::MAX, stride: 256 };
        assert!(resolve(launch([ONE; 3], vec![far]), 8).is_err());
    }

    #[test]
    fn grids_follow_rows_context_and_multiprocessors() {
        let grid = [
            Count::Multiprocessors { times: 2, share: 3, limit: 80 },
            Count::Rows { per: 2, times: 5 },
            Count::Context { per: 64, times: 2 },
        ];
        let (_, grid) = resolve(launch(grid, vec![]), 7).expect("valid");
        assert_eq!(grid, [80, 20, 2]);
    }

    #[test]
    fn empty_and_impossible_grids_are_refused() {
        for grid in [
            [Count::Fixed(0), ONE, ONE],
            [Count::Fixed(u32::MAX), ONE, ONE],
            [ONE, Count::Fixed(65_536), ONE],
            [Count::Rows { per: 1, times: u32::MAX }, ONE, ONE],
        ] {
            let error = resolve(launch(grid, vec![]), 2).expect_err("no grid");
            assert!(error.contains("launch 0"), "{error}");
        }
    }

    #[test]
    fn places_that_a_plan_does_not_have_are_refused() {
        for argument in [
            Argument::Address(Place::Packed(9), 0),
            Argument::Address(Place::Logits, 4 * 97),
            Argument::BufferRows(2),
        ] {
            assert!(resolve(launch([ONE; 3], vec![argument]), 1).is_err(), "{argument:?}");
        }
    }

    #[test]
    fn a_call_takes_the_narrowest_form_and_longer_ones_are_cut() {
        let mut plan = plan_for("sm_90");
        let form = |min_rows, max_rows| Lowered {
            method: "prefill".to_owned(),
            min_rows,
            max_rows,
            launches: Vec::new(),
        };
        plan.methods = vec![form(1, 8), form(9, 512), form(9, 64)];
        let cut = |mut rows: u32| {
            let mut pieces = Vec::new();
            while rows > 0 {
                let (form, taken) = lowered(&plan, "prefill", rows).expect("a form");
                assert!((form.min_rows..=form.max_rows).contains(&taken));
                pieces.push((form.max_rows, taken));
                rows -= taken;
            }
            pieces
        };
        assert_eq!(cut(1), [(8, 1)]);
        assert_eq!(cut(8), [(8, 8)]);
        assert_eq!(cut(9), [(64, 9)]);
        assert_eq!(cut(65), [(512, 65)]);
        assert_eq!(cut(1030), [(512, 512), (512, 512), (8, 6)]);
        assert!(lowered(&plan, "decode", 1).is_none());
    }
}
