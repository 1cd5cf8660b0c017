//! Where everything lies in the one piece of device memory that a program runs in, and whether
//! that fits.

use gemma4_format::plan::{Place, Plan, state, table};
use gemma4_format::{Buffer, Extents, Program};

use crate::{Error, Result};

/// Every region starts on a multiple of this, in bytes.
pub(super) const ALIGNMENT: u64 = 256;
/// Bytes left to the driver for graphs, launches and what kernels keep in local memory.
const RESERVE: u64 = 128 << 20;
/// Bytes of a session's state, after which its tokens follow.
pub(super) const STATE_BYTES: u64 = 4 * state::WORDS as u64;

/// A piece of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) at: u64,
    pub(super) bytes: u64,
}

impl Region {
    pub(super) fn end(self) -> u64 {
        self.at + self.bytes
    }
}

/// Memory of one session.
#[derive(Clone, Debug)]
pub(super) struct SessionLayout {
    /// State and tokens, which one copy brings to the device.
    pub(super) state: Region,
    /// Its addresses, copied to [`Layout::table`] when its turn comes.
    pub(super) table: Region,
    /// Its logits while it is another session's turn.
    pub(super) logits: Region,
    /// Keys and values, one after another in the order of the program's buffers.
    pub(super) buffers: Vec<Region>,
}

impl SessionLayout {
    /// All buffers, with the gaps between them.
    pub(super) fn buffers_span(&self) -> Region {
        let at = self.buffers.first().map_or(0, |b| b.at);
        Region { at, bytes: self.buffers.last().map_or(0, |b| b.end()) - at }
    }

    /// What stands in its table; `ring` is the address of its tokens' ring.
    pub(super) fn addresses(&self, ring: u64) -> Vec<u64> {
        let mut addresses = vec![0; table::BUFFERS as usize];
        addresses[table::STATE as usize] = self.state.at;
        addresses[table::OUTPUT as usize] = ring;
        addresses[table::TOKENS as usize] = self.state.at + STATE_BYTES;
        addresses.extend(self.buffers.iter().map(|b| b.at));
        addresses
    }
}

/// Addresses of all places of a plan and of all sessions.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) packed: Vec<Region>,
    pub(super) resident: Vec<Region>,
    pub(super) stops: Region,
    pub(super) table: Region,
    pub(super) logits: Region,
    pub(super) scratch: Region,
    pub(super) sessions: Vec<SessionLayout>,
    /// Bytes of it all.
    pub(super) bytes: u64,
}

/// Places regions one after another from an address on.
struct Placer {
    start: u64,
    end: u64,
}

impl Placer {
    fn place(&mut self, bytes: u64) -> Option<Region> {
        let at = self.end.checked_next_multiple_of(ALIGNMENT)?;
        self.end = at.checked_add(bytes)?;
        Some(Region { at, bytes })
    }
}

impl Layout {
    /// Lays out a plan for sessions of `context` tokens from `base` on, a multiple of
    /// [`ALIGNMENT`]. `None` if sizes exceed 64 bits.
    pub(super) fn new(
        program: &Program,
        plan: &Plan,
        context: u32,
        sessions: u32,
        base: u64,
    ) -> Option<Self> {
        let mut placer = Placer { start: base, end: base };
        let packed =
            plan.packed.iter().map(|p| placer.place(p.bytes)).collect::<Option<Vec<_>>>()?;
        let resident = plan
            .resident
            .iter()
            .map(|(weight, part)| placer.place(part_bytes(program, *weight, *part)?))
            .collect::<Option<Vec<_>>>()?;
        let logits_bytes = logits_bytes(program) * u64::from(program.logits_rows());
        let table_bytes = 8 * (u64::from(table::BUFFERS) + program.buffers.len() as u64);
        let stops = placer.place(4 * program.text.stop_tokens.len().max(1) as u64)?;
        let table = placer.place(table_bytes)?;
        let logits = placer.place(logits_bytes)?;
        let scratch = placer.place(plan.scratch)?;
        let rows = plan.methods.iter().map(|m| m.max_rows).max().unwrap_or(1);
        let sessions = (0..sessions)
            .map(|_| {
                Some(SessionLayout {
                    state: placer.place(STATE_BYTES + 4 * u64::from(rows))?,
                    table: placer.place(table_bytes)?,
                    logits: placer.place(logits_bytes)?,
                    buffers: program
                        .buffers
                        .iter()
                        .zip(&plan.position_bytes)
                        .map(|(b, bytes)| placer.place(buffer_bytes(b, *bytes, context)?))
                        .collect::<Option<Vec<_>>>()?,
                })
            })
            .collect::<Option<Vec<_>>>()?;
        let bytes = placer.end - placer.start;
        Some(Self { packed, resident, stops, table, logits, scratch, sessions, bytes })
    }

    /// The region of a place, if the plan has it.
    pub(super) fn place(&self, place: Place) -> Option<Region> {
        match place {
            Place::Packed(id) => self.packed.get(id as usize).copied(),
            Place::Resident(id) => self.resident.get(id as usize).copied(),
            Place::Scratch => Some(self.scratch),
            Place::Table => Some(self.table),
            Place::Logits => Some(self.logits),
            Place::Stops => Some(self.stops),
        }
    }
}

/// Bytes of a row of logits.
pub(super) fn logits_bytes(program: &Program) -> u64 {
    4 * u64::from(program.vocab_size)
}

fn part_bytes(program: &Program, weight: u32, part: u32) -> Option<u64> {
    let weight = program.weights.get(weight as usize)?;
    let parts = weight.encoding.parts(&weight.name, &weight.dims).ok()?;
    parts.get(part as usize).map(|p| p.bytes())
}

fn buffer_bytes(buffer: &Buffer, position_bytes: u32, context: u32) -> Option<u64> {
    let rows = buffer.dims.first()?.resolve(Extents { rows: 1, context });
    u64::from(rows).checked_mul(u64::from(position_bytes))
}

/// What a program is to be loaded for.
pub(super) struct Request<'a> {
    pub(super) program: &'a Program,
    pub(super) plan: &'a Plan,
    /// Tokens of each session.
    pub(super) context: u32,
    pub(super) sessions: u32,
    /// Bytes that only loading needs.
    pub(super) staging: u64,
}

impl Request<'_> {
    /// Bytes of device memory that are needed with sessions of `context` tokens.
    pub(super) fn bytes(&self, context: u32) -> Option<u64> {
        let layout = Layout::new(self.program, self.plan, context, self.sessions, 0)?;
        layout.bytes.checked_add(self.staging)?.checked_add(RESERVE)
    }

    /// Longest context that fits, if any does.
    pub(super) fn longest(&self, available: u64) -> Option<u32> {
        let fits = |context| self.bytes(context).is_some_and(|bytes| bytes <= available);
        let (mut fitting, mut above) = (0, self.program.max_context.saturating_add(1));
        while above - fitting > 1 {
            let middle = fitting + (above - fitting) / 2;
            if fits(middle) { fitting = middle } else { above = middle }
        }
        (fitting > 0).then_some(fitting)
    }

    /// Fails with a sentence that has the numbers if it does not fit into `available` bytes.
    pub(super) fn check(&self, device: &str, available: u64) -> Result<()> {
        let need = self.bytes(self.context).unwrap_or(u64::MAX);
        if need <= available {
            return Ok(());
        }
        let sessions = match self.sessions {
            1 => String::new(),
            n => format!(" in each of {n} sessions (`--max_sessions`)"),
        };
        let Some(longest) = self.longest(available) else {
            let least = self.bytes(1).unwrap_or(u64::MAX);
            return Err(Error::Device(format!(
                "{device} has {available} bytes of memory free, and the program needs {least} \
                 even with the shortest context{sessions}; free some, or use the CPU with \
                 `--device cpu`"
            )));
        };
        let what = format!(
            "a context of {} tokens{sessions} on {device}, where {longest} would fit,",
            self.context
        );
        Err(Error::Memory { what, need, available })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::testing::{plan_for, program, verify};

    fn request<'a>(program: &'a Program, plan: &'a Plan, sessions: u32) -> Request<'a> {
        Request { program, plan, context: program.max_context, sessions, staging: 1000 }
    }

    #[test]
    fn regions_are_aligned_and_disjoint() {
        let (program, plan) = (program(), plan_for("sm_90"));
        let layout = Layout::new(&program, &plan, 40, 2, 1 << 20).expect("small");
        let mut regions = layout.packed.clone();
        regions.extend(&layout.resident);
        regions.extend([layout.stops, layout.table, layout.logits, layout.scratch]);
        for session in &layout.sessions {
            regions.extend([session.state, session.table, session.logits]);
            regions.extend(&session.buffers);
        }
        regions.sort_by_key(|r| r.at);
        assert_eq!(regions[0].at, 1 << 20);
        assert!(regions.iter().all(|r| r.at % ALIGNMENT == 0));
        assert!(regions.windows(2).all(|pair| pair[0].end() <= pair[1].at));
        assert_eq!(layout.bytes, regions.last().expect("some").end() - (1 << 20));
    }

    #[test]
    fn sizes_are_those_of_the_program_and_the_plan() {
        let (program, plan) = (program(), plan_for("sm_90"));
        let layout = Layout::new(&program, &plan, 40, 1, 0).expect("small");
        assert_eq!(layout.packed[0].bytes, 4096);
        // `norm`, bf16[64].
        assert_eq!(layout.resident[0].bytes, 128);
        assert_eq!(layout.logits.bytes, 4 * 97);
        assert_eq!(layout.stops.bytes, 4 * 2);
        // 16 words and the 8 tokens of the longest call.
        assert_eq!(layout.sessions[0].state.bytes, 64 + 32);
        // A ring of min(14, 40) rows and 40 rows, of 2 heads of 16 numbers of 2 bytes.
        let buffers: Vec<u64> = layout.sessions[0].buffers.iter().map(|b| b.bytes).collect();
        assert_eq!(buffers, [14 * 64, 40 * 64]);
    }

    #[test]
    fn a_program_with_verify_keeps_logits_of_all_its_rows() {
        let (mut program, plan) = (program(), plan_for("sm_90"));
        let without = Layout::new(&program, &plan, 40, 3, 0).expect("small");
        program.methods.push(verify(8));
        let layout = Layout::new(&program, &plan, 40, 3, 0).expect("small");
        assert_eq!(layout.logits.bytes, 8 * 4 * 97);
        assert!(layout.sessions.iter().all(|s| s.logits.bytes == 8 * 4 * 97));
        // Those of all calls, and of three sessions while it is another's turn.
        assert!(layout.bytes >= without.bytes + 4 * 7 * 4 * 97 - 4 * ALIGNMENT);
    }

    #[test]
    fn a_table_holds_the_addresses_of_its_session() {
        let (program, plan) = (program(), plan_for("sm_90"));
        let layout = Layout::new(&program, &plan, 40, 2, 4096).expect("small");
        let session = &layout.sessions[1];
        let at = session.state.at;
        let expected = [at, 77, at + 64, session.buffers[0].at, session.buffers[1].at];
        assert_eq!(session.addresses(77), expected);
        let span = session.buffers_span();
        assert_eq!((span.at, span.end()), (session.buffers[0].at, session.buffers[1].end()));
    }

    #[test]
    fn longer_contexts_and_more_sessions_need_more() {
        let (program, plan) = (program(), plan_for("sm_90"));
        let one = request(&program, &plan, 1);
        let needs: Vec<u64> = (1..=200).map(|c| one.bytes(c).expect("small")).collect();
        assert!(needs.windows(2).all(|pair| pair[0] <= pair[1]));
        assert!(needs[0] < needs[199]);
        let two = request(&program, &plan, 2);
        assert!((1..=200).all(|c| two.bytes(c) > one.bytes(c)));
    }

    #[test]
    fn the_longest_context_fits_and_the_next_does_not() {
        let (program, plan) = (program(), plan_for("sm_90"));
        let request = request(&program, &plan, 3);
        for context in [1, 2, 60, 199, 200] {
            let available = request.bytes(context).expect("small");
            let longest = request.longest(available).expect("it fits");
            assert!(longest >= context);
            assert!(longest == 200 || request.bytes(longest + 1).expect("small") > available);
            assert!(request.check("gpu", available).is_ok() == (longest == 200));
        }
        assert_eq!(request.longest(request.bytes(1).expect("small") - 1), None);
    }

    #[test]
    fn what_does_not_fit_is_said_with_numbers() {
        let (program, plan) = (program(), plan_for("sm_90"));
        let request = request(&program, &plan, 1);
        let available = request.bytes(60).expect("small");
        let error = request.check("cuda:0 H200", available).expect_err("too long");
        let longest = request.longest(available).expect("60 fit").to_string();
        let text = error.to_string();
        let need = request.bytes(200).expect("small").to_string();
        for part in ["200 tokens", "cuda:0 H200", &longest, &need, &available.to_string()] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(error.class().code(), 3);
        let error = request.check("cuda:0 H200", 1000).expect_err("no room at all");
        assert!(error.to_string().contains("even with the shortest context"), "{error}");
        assert_eq!(error.class().code(), 3);
        assert!(!error.to_string().contains("--max_sessions"), "{error}");
    }

    #[test]
    fn sessions_that_do_not_fit_name_their_flag() {
        let (program, plan) = (program(), plan_for("sm_90"));
        let one = request(&program, &plan, 1).bytes(200).expect("small");
        let several = request(&program, &plan, 100);
        assert!(several.bytes(200).expect("small") > one);
        // What one session of 200 tokens takes is too little for 100 of them.
        for available in [one, several.bytes(1).expect("small") - 1] {
            let error = several.check("gpu", available).expect_err("too many").to_string();
            assert!(error.contains("100 sessions (`--max_sessions`)"), "{error}");
        }
        several.check("gpu", several.bytes(200).expect("small")).expect("as predicted");
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        let (mut program, mut plan) = (program(), plan_for("sm_90"));
        program.buffers.iter_mut().for_each(|b| b.dims[0] = gemma4_format::Dim::Fixed(u32::MAX));
        plan.position_bytes = vec![u32::MAX; 2];
        assert!(Layout::new(&program, &plan, 40, 1, 0).is_none());
        assert!(request(&program, &plan, 1).check("gpu", u64::MAX - 1).is_err());
    }
}
