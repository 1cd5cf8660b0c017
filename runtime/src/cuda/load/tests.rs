use super::*;
use crate::cuda::testing::{plan_for, program};

fn pack(sources: Vec<u32>, rows_per_tile: u32) -> Pack {
    Pack {
        kernel: 0,
        packed: 0,
        sources,
        rows_per_tile,
        first_tile: 5,
        total_rows: 160,
        units_per_tile: 3,
        warps_per_block: 8,
    }
}

/// The tensors of `matrix`, `[80, 64]`: codes, scales and zeros, whose bytes name their row.
fn matrix() -> Vec<Vec<u8>> {
    let rows = |bytes: usize| (0..80u8).flat_map(|row| vec![row; bytes]).collect();
    vec![rows(32), rows(4), rows(1)]
}

fn blocks<'a>(pack: &Pack, capacity: u64, tensors: &'a [Vec<u8>]) -> Vec<Block<'a>> {
    let mut blocks = Vec::new();
    let stored = |_| tensors.iter().map(Vec::as_slice).collect();
    pack_blocks(&program(), pack, 1 << 30, capacity, &stored, &mut blocks).expect("packs");
    blocks
}

fn tiles(block: &Block<'_>) -> (u32, [u64; 2 * PARTS + 5]) {
    match &block.then {
        Then::Pack(tiles) => (tiles.grid, tiles.words(1 << 20)),
        Then::Keep(_) => panic!("not a pack"),
    }
}

#[test]
fn blocks_are_whole_tiles_that_fit_and_cover_all_rows() {
    let tensors = matrix();
    // 48 rows take 1536 + 256 + 256 bytes.
    let blocks = blocks(&pack(vec![0], 16), 2048, &tensors);
    let mut seen = Vec::new();
    for block in &blocks {
        assert!(block.staged <= 2048);
        for (offset, _) in &block.copies {
            assert_eq!(offset % ALIGNMENT as usize, 0);
        }
        let rows = |part: usize, bytes: usize| {
            block.copies[part].1.chunks(bytes).map(|row| row[0]).collect::<Vec<u8>>()
        };
        assert_eq!(rows(0, 32), rows(1, 4));
        assert_eq!(rows(0, 32), rows(2, 1));
        seen.extend(rows(0, 32));
    }
    assert_eq!(seen, (0..80).collect::<Vec<u8>>());
    let launches: Vec<_> =
        blocks.iter().map(tiles).map(|(grid, w)| (grid, w[9], w[10], w[11])).collect();
    // Grid, first tile, tiles, rows.
    assert_eq!(launches, [(2, 5, 3, 48), (1, 8, 2, 32)]);
}

#[test]
fn arguments_name_the_parts_of_both_sources() {
    let tensors = matrix();
    let base = 1 << 20;
    let one = &blocks(&pack(vec![0], 16), 1 << 20, &tensors)[0];
    // 80 rows: codes 2560 bytes, scales 320, zeros 80.
    let parts = [base, 0, base + 2560, base + 3072];
    let (_, words) = tiles(one);
    assert_eq!(words[..4], parts);
    assert_eq!(words[4..8], parts);
    assert_eq!(words[8..], [1 << 30, 5, 5, 80, 160]);
    assert_eq!(one.staged, 3072 + 256);
    let two = &blocks(&pack(vec![0, 0], 8), 1 << 20, &tensors)[0];
    let (_, words) = tiles(two);
    assert_eq!(words[..4], parts);
    assert_eq!(words[4..8], [base + 3328, 0, base + 3328 + 2560, base + 3328 + 3072]);
    assert_eq!(words[8..], [1 << 30, 5, 10, 80, 160]);
}

#[test]
fn a_tile_larger_than_a_block_is_staged_whole() {
    let tensors = matrix();
    let blocks = blocks(&pack(vec![0], 16), 1, &tensors);
    assert_eq!(blocks.len(), 5);
    let mut plan = plan_for("sm_90");
    plan.packs = vec![pack(vec![0], 16)];
    let layout = Layout::new(&program(), &plan, 40, 1, 0).expect("small");
    let whole = 2560 + 512 + 256;
    assert_eq!(staging(&program(), &plan, &layout), Ok(LANES * whole));
}

#[test]
fn weights_of_different_heights_are_not_packed_together() {
    let mut blocks = Vec::new();
    let stored = |_| Vec::new();
    let pack = pack(vec![0, 1], 8);
    assert!(pack_blocks(&program(), &pack, 0, 1 << 20, &stored, &mut blocks).is_err());
}

#[test]
fn a_tensor_that_is_too_short_is_refused() {
    let tensors = [vec![0; 2560], vec![0; 320], vec![0; 79]];
    let mut blocks = Vec::new();
    let stored = |_| tensors.iter().map(Vec::as_slice).collect();
    let pack = pack(vec![0], 16);
    assert!(pack_blocks(&program(), &pack, 0, 1 << 20, &stored, &mut blocks).is_err());
}

#[test]
fn resident_tensors_go_to_their_place_piece_by_piece() {
    let bytes: Vec<u8> = (0..=255).collect();
    let mut blocks = Vec::new();
    keep_blocks(&bytes, 1000, 100, &mut blocks);
    let placed: Vec<(u64, usize)> = blocks
        .iter()
        .map(|block| match block.then {
            Then::Keep(at) => (at, block.staged),
            Then::Pack(_) => panic!("not kept"),
        })
        .collect();
    assert_eq!(placed, [(1000, 100), (1100, 100), (1200, 56)]);
    assert_eq!(blocks[1].copies[0].1, &bytes[100..200]);
}

#[test]
fn copies_land_at_their_offsets() {
    let pool = ThreadPoolBuilder::new().num_threads(2).build().expect("threads");
    let long = vec![3; PIECE + 5];
    let copies: [(usize, &[u8]); 3] = [(0, &[1, 2]), (4, &[]), (10, &long)];
    for pool in [None, Some(&pool)] {
        let mut target = vec![9; PIECE + 20];
        fill(&mut target, &copies, pool);
        assert_eq!(target[..10], [1, 2, 9, 9, 9, 9, 9, 9, 9, 9]);
        assert!(target[10..][..PIECE + 5].iter().all(|b| *b == 3));
        assert_eq!(target[PIECE + 15..], [9; 5]);
    }
}

#[test]
fn random_norms_are_near_one_and_follow_the_seed() {
    let (program, plan) = (program(), plan_for("sm_90"));
    let norm = |seed| random_resident(&program, &plan, seed).expect("numbers");
    let bytes = &norm(1)[0];
    assert_eq!(bytes.len(), 128);
    for at in 0..64 {
        let x = DType::BF16.read(bytes, at);
        assert!((0.89..1.11).contains(&x), "{x}");
    }
    assert_eq!(norm(1), norm(1));
    assert_ne!(norm(1), norm(2));
}
